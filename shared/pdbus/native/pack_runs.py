"""A linear layer packed run by run of its output channels, so that no second copy of all of it ever exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from pdbus.native.abi import LANES, LinearStruct, address
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
        """Given so far."""
        self._kind, self._inputs = 0, 0
        self._arrays: tuple[Array | None, ...] = ()

    def add(self, weight: Rows, bias: Array | None = None, at: int | None = None) -> None:
        """weight [rows, inputs], bias fp32 [rows]; rows: a multiple of 16, unless they are the last ones.

        `bias`: for all rows of the layer, or for none. `at`: the first row, where they don't come in order."""
        first = self._rows if at is None else at
        step = max(_RUN_BYTES // weight[:1].nbytes // LANES, 1) * LANES
        for start in range(0, len(weight), step):
            run = slice(start, start + step)
            self.put(self._pack(weight[run], None if bias is None else bias[run]), first + start)

    def packed(self) -> PackedLinear:
        """The whole layer, once all its rows were given."""
        assert self._rows == self._outputs, f"{self._rows} of {self._outputs} rows were given"
        struct = LinearStruct(self._kind, self._outputs, self._inputs, 0, *map(address, self._arrays))
        return PackedLinear(struct, self._arrays)

    def put(self, run: PackedLinear, at: int) -> None:
        """Rows that are packed, from row `at` on."""
        rows = run.struct.outputs
        assert not at % LANES, "a run begins with a panel"
        panels, before = -(-rows // LANES), at // LANES
        if not self._arrays:
            self._kind, self._inputs = run.struct.kind, run.struct.inputs
            total = -(-self._outputs // LANES)
            # Some have an entry per panel, others one per channel.
            self._arrays = tuple(_sized(array, len(array) // panels * total) if array is not None else None
                                 for array in run.arrays)  # fmt: skip
        for whole, part in zip(self._arrays, run.arrays, strict=True):
            if whole is not None and part is not None:
                start = len(part) // panels * before
                whole[start : start + len(part)] = part
        self._rows += rows

    def given(self, at: int, rows: int) -> PackedLinear:
        """Rows from `at` on, as they are packed: views of the layer. They were given."""
        total = -(-self._outputs // LANES)
        panels = slice(at // LANES, -(-(at + rows) // LANES))
        arrays = tuple(
            None if array is None else array[len(array) // total * panels.start : len(array) // total * panels.stop]
            for array in self._arrays
        )
        return PackedLinear(LinearStruct(self._kind, rows, self._inputs, 0, *map(address, arrays)), arrays)


def _sized(like: Array, length: int) -> Array:
    return np.empty((length, *like.shape[1:]), like.dtype)
