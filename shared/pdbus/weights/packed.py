"""The forms in which versions of other precisions hold their matrices: a row of bytes for each row of weights.

    fp16   the elements, IEEE half precision                         bf16   the upper halves of their fp32
    fp8    fp32 scale | e4m3 codes (OCP 8-bit floating point: no infinities, 448 the largest); weight = scale * code
    int8   -127 to 127 for each element | an fp16 scale for each 32 of them; weight = scale * code

Everything is little-endian and made row by row, so that an equal row of fp32 gives equal bytes on every machine.
Rounding is to the nearest, half to even. int8 is what the native engine's int8 computes with (model/quantize.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pdbus.weights.blocks import GROUP, Array

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_LARGEST_FP8 = np.float32(448.0)
_LEAST_NORMAL_FP8 = np.float32(2.0**-6)
_STEPS_BELOW_FP8 = np.float32(2.0**9)
"""Below the least normal number, e4m3 has steps of 2^-9."""


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Rows of a matrix, to be computed with as they are. Slicing gives views."""

    weight: Array
    """int8 [rows, inputs], -127 to 127."""
    scale: Array
    """fp16 [rows, inputs / 32]"""

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, rows: slice) -> Int8Rows:
        return Int8Rows(self.weight[rows], self.scale[rows])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes

    def widened(self) -> Floats:
        """fp32 [rows, inputs], what the kernels compute with."""
        grouped = self.weight.reshape(len(self), -1, GROUP) * self.scale[..., None].astype(np.float32)
        wide: Floats = grouped.reshape(self.weight.shape)
        return wide

    def packed(self) -> Bytes:
        """[rows, inputs + 2 * inputs / 32]"""
        parts = (self.weight, np.ascontiguousarray(self.scale, "<f2"))
        return np.concatenate([part.view(np.uint8).reshape(len(self), -1) for part in parts], 1)

    @classmethod
    def unpacked(cls, rows: Bytes, inputs: int) -> Int8Rows:
        """Of what `packed` made."""
        scale = np.ascontiguousarray(rows[:, inputs:]).view("<f2")
        return cls(rows[:, :inputs].view(np.int8), scale)


def pack_floats(rows: Floats, dtype: str) -> Bytes:
    """fp32 [rows, elements] as fp16, bf16 or fp8, [rows, bytes]. A number that the form can't hold becomes infinite in
    fp16 and bf16."""
    match dtype:
        case "fp16":
            with np.errstate(over="ignore"):
                return _as_bytes(rows.astype("<f2"))
        case "bf16":
            bits = np.ascontiguousarray(rows).view(np.uint32)
            return _as_bytes(((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2"))
        case "fp8":
            scale = (np.abs(rows).max(1, initial=0) / _LARGEST_FP8).astype("<f4")[:, None]
            steps = np.divide(rows, scale, out=np.zeros_like(rows), where=scale != 0)
            return np.concatenate((_as_bytes(scale), fp8_codes(steps)), 1)
    raise ValueError(f"no form of floats is called {dtype}")


def widened(dtype: str, rows: Bytes, shape: Sequence[int]) -> Floats:
    """The fp32 weights, of `shape`, that packed rows [rows, bytes] stand for."""
    wide: Floats = _WIDENING[dtype](rows, math.prod(shape[1:]))
    return wide.reshape(shape)


def fp8_codes(values: Floats) -> Bytes:
    """The nearest e4m3 numbers of fp32 ones, the largest where they are beyond it."""
    size = np.abs(values)
    bits = size.view(np.uint32)
    # Exponent and the upper 3 bits of the mantissa, rounded; less the difference of the two biases (127 and 7).
    normal = ((bits + (0x7FFFF + ((bits >> 20) & 1))) >> 20).astype(np.int32) - (120 << 3)
    below = np.rint(size * _STEPS_BELOW_FP8).astype(np.int32)
    codes = np.minimum(np.where(size < _LEAST_NORMAL_FP8, below, normal), 0x7E)
    return (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def fp8_values() -> Floats:
    """By code, what it stands for: 256 numbers, two of them NaN."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(codes & 0x7F) == 0x7F] = np.nan
    values: Floats = np.where(codes & 0x80, -size, size).astype(np.float32)
    return values


def _wide_fp8(rows: Bytes, elements: int) -> Array:
    scale = np.ascontiguousarray(rows[:, :4]).view("<f4")
    wide: Array = fp8_values()[rows[:, 4:]] * scale
    return wide


def _wide_int8(rows: Bytes, elements: int) -> Array:
    return Int8Rows.unpacked(rows, elements).widened()


def _wide_bf16(rows: Bytes, elements: int) -> Array:
    return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)


_WIDENING: Mapping[str, Callable[[Bytes, int], Any]] = MappingProxyType(
    {
        "fp16": lambda rows, elements: rows.view("<f2").astype(np.float32),
        "bf16": _wide_bf16,
        "fp8": _wide_fp8,
        "int8": _wide_int8,
    }
)


def _as_bytes(array: Array) -> Bytes:
    """[rows, …] -> [rows, bytes]"""
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
