"""A linear layer packed run by run of its output channels, so that no second copy of all of it ever exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from pdbus.native.library import LANES, LinearStruct, address
from pdbus.native.pack import PackedLinear
from pdbus.weights.packed import Int8Rows

Array: TypeAlias = "np.ndarray[Any, Any]"
Rows: TypeAlias = "Array | Int8Rows"
Pack: TypeAlias = "Callable[[Any, Array | None], PackedLinear]"
"""Packs some rows of a weight, with their biases."""

_RUN_BYTES = 512 << 10
"""Of fp32: what quantising and packing make of it on the way stays within a core's cache."""


class PackedRuns:
    """Takes the rows of a linear layer in order, as many at a time as there are."""

    def __init__(self, outputs: int, pack: Pack) -> None:
        self._outputs, self._pack = outputs, pack
        self._rows = 0
        self._kind, self._inputs = 0, 0
        self._arrays: tuple[Array | None, ...] = ()

    def add(self, weight: Rows, bias: Array | None = None) -> None:
        """weight [rows, inputs], bias fp32 [rows]; rows: a multiple of 16, unless they are the last ones.

        `bias`: for all rows of the layer, or for none."""
        step = max(_RUN_BYTES // weight[:1].nbytes // LANES, 1) * LANES
        for start in range(0, len(weight), step):
            run = slice(start, start + step)
            self._append(self._pack(weight[run], None if bias is None else bias[run]))

    def packed(self) -> PackedLinear:
        """The whole layer, once all its rows were given."""
        assert self._rows == self._outputs, f"{self._rows} of {self._outputs} rows were given"
        struct = LinearStruct(self._kind, self._outputs, self._inputs, 0, *map(address, self._arrays))
        return PackedLinear(struct, self._arrays)

    def _append(self, run: PackedLinear) -> None:
        rows = run.struct.outputs
        assert not self._rows % LANES, "a run begins with a panel"
        panels, before = -(-rows // LANES), self._rows // LANES
        if not self._arrays:
            self._kind, self._inputs = run.struct.kind, run.struct.inputs
            total = -(-self._outputs // LANES)
            # Some have an entry per panel, others one per channel.
            self._arrays = tuple(_sized(array, len(array) // panels * total) if array is not None else None
                                 for array in run.arrays)  # fmt: skip
        for whole, part in zip(self._arrays, run.arrays, strict=True):
            if whole is not None and part is not None:
                at = len(part) // panels * before
                whole[at : at + len(part)] = part
        self._rows += rows


def _sized(like: Array, length: int) -> Array:
    return np.empty((length, *like.shape[1:]), like.dtype)
