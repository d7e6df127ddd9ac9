"""Weights in the order in which the kernels read them (src/tiles.h): panels of 16 output channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from pdbus.native.abi import GROUP, LANES, Kind, LinearStruct, address

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer ready for the kernels. Owns its arrays: `struct` points into them."""

    struct: LinearStruct
    arrays: tuple[Array | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays if array is not None)


def pack_f32(weight: Array, bias: Array | None = None) -> PackedLinear:
    """weight fp32 [outputs, inputs], bias fp32 [outputs]."""
    panels = _panels(weight)  # [panels, 16, inputs]
    return _linear(Kind.F32, weight.shape, np.ascontiguousarray(panels.transpose(0, 2, 1)), bias)


def pack_i8(weight: Array, scale: Array, bias: Array | None = None) -> PackedLinear:
    """weight int8 [outputs, inputs] of -127 to 127, scale fp32 [outputs]."""
    panels = _panels(weight)
    steps = panels.reshape(*panels.shape[:2], -1, 4)  # [panels, 16, inputs / 4, 4]
    packed = np.ascontiguousarray(steps.transpose(0, 2, 1, 3))
    return _linear(Kind.I8, weight.shape, packed, bias, _padded(scale))


def pack_g4(codes: Array, scale: Array, least: Array, bias: Array | None = None) -> PackedLinear:
    """codes uint8 [outputs, inputs] of 0 to 15; scale, least fp16 [outputs, inputs / 32]."""
    steps = _steps(codes)  # [panels, groups, 8, 16, 4]
    halves = steps[:, :, :4] | (steps[:, :, 4:] << 4)  # [panels, groups, 4, 16, 4]
    parts = (halves.reshape(*halves.shape[:2], -1), _group_bytes(scale), _group_bytes(least))
    return _linear(Kind.G4, codes.shape, np.ascontiguousarray(np.concatenate(parts, -1)), bias)


def pack_g8(weight: Array, scale: Array, bias: Array | None = None) -> PackedLinear:
    """weight int8 [outputs, inputs] of -127 to 127, scale fp16 [outputs, inputs / 32]."""
    steps = _steps(weight).view(np.uint8)
    parts = (steps.reshape(*steps.shape[:2], -1), _group_bytes(scale))
    return _linear(Kind.G8, weight.shape, np.ascontiguousarray(np.concatenate(parts, -1)), bias)


def interleaved(gate: Array, up: Array) -> Array:
    """Rows (or values) of gate and up, 16 of each in turn, as the fused SiLU wants them."""
    pairs = np.stack((gate.reshape(-1, LANES, *gate.shape[1:]), up.reshape(-1, LANES, *up.shape[1:])), 1)
    return np.ascontiguousarray(pairs.reshape(-1, *gate.shape[1:]))


def _panels(weight: Array) -> Array:
    """[outputs, inputs] -> [panels, 16, inputs], the last panel filled up with zeros."""
    missing = -len(weight) % LANES
    whole = np.concatenate((weight, np.zeros((missing, *weight.shape[1:]), weight.dtype))) if missing else weight
    return whole.reshape(-1, LANES, *weight.shape[1:])


def _steps(codes: Array) -> Array:
    """[outputs, inputs] -> [panels, groups, 8 steps, 16, 4]."""
    panels = _panels(codes)
    return np.ascontiguousarray(panels.reshape(*panels.shape[:2], -1, GROUP // 4, 4).transpose(0, 2, 3, 1, 4))


def _group_bytes(values: Array) -> Array:
    """fp16 [outputs, groups] -> bytes [panels, groups, 32]."""
    return np.ascontiguousarray(_panels(values.astype("<f2")).transpose(0, 2, 1)).view(np.uint8)


def _padded(values: Array) -> Array:
    return np.ascontiguousarray(_panels(values.astype(np.float32)).reshape(-1))


def _linear(
    kind: Kind,
    shape: tuple[int, ...],
    weight: Array,
    bias: Array | None,
    scale: Array | None = None,
) -> PackedLinear:
    outputs, inputs = shape
    if inputs % GROUP:
        raise ValueError(f"the kernels take inputs in groups of {GROUP}, not {inputs}")
    padded_bias = None if bias is None else _padded(bias)
    struct = LinearStruct(kind, outputs, inputs, 0, address(weight), address(scale), address(padded_bias))
    return PackedLinear(struct, (weight, scale, padded_bias))
