"""Some output channels of a packed linear layer replaced: bit for bit what packing all of it anew would give.

It holds for packings that make each channel from its own row alone, and keep all of it in a panel's bytes: all but
those of rotated weights. Sixteen channels share a panel; those that stay are taken from what was packed before.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from pdbus.native.abi import LANES, Kind, LinearStruct, address
from pdbus.native.pack import PackedLinear

Array: TypeAlias = "np.ndarray[Any, Any]"
Room: TypeAlias = "Callable[[tuple[int, ...], np.dtype[Any]], Array]"
"""Makes an uninitialised array in C order."""

_RUN_BYTES = 512 << 10
"""Of fp32, packed at a time: as in pack_runs.py."""


class PatchedLinear:
    """A copy of `old`, which is left as it is, with other rows put into it."""

    def __init__(self, old: PackedLinear, room: Room = np.empty) -> None:
        self._struct = old.struct
        self._arrays = tuple(None if array is None else _copy(array, room) for array in old.arrays)
        self._lanes = _lanes(Kind(old.struct.kind))

    def put(
        self, row: int, weight: Array, pack: Callable[[Array], PackedLinear], every: int = 1, offset: int = 0
    ) -> None:
        """weight fp32 [rows, inputs], from row `row` on, made by `pack`. With `every` and `offset`, rows are counted
        among each `every`-th panel from panel `offset` on: gate and up have panels in turn."""
        weights = self._arrays[0]
        assert weights is not None
        panels = weights[offset::every]
        step = max(_RUN_BYTES // weight[:1].nbytes // LANES, 1) * LANES
        for start, stop in _runs(len(weight), LANES - row % LANES, step):
            lead = (row + start) % LANES
            run = weight[start:stop]
            packed = pack(np.concatenate((np.zeros((lead, run.shape[1]), np.float32), run)) if lead else run)
            made = packed.arrays[0]
            assert made is not None
            first = (row + start) // LANES
            self._merge(panels[first : first + len(made)], made, lead, lead + len(run))

    def put_bias(self, row: int, values: Array, every: int = 1, offset: int = 0) -> None:
        """values fp32 [rows], from row `row` on; counted as in `put`."""
        bias = self._arrays[2]
        assert bias is not None, "a layer with a bias has one in every version"
        rows = np.arange(row, row + len(values))
        panel = rows // LANES * every + offset
        bias[panel * LANES + rows % LANES] = values

    def packed(self) -> PackedLinear:
        old = self._struct
        struct = LinearStruct(old.kind, old.outputs, old.inputs, 0, *map(address, self._arrays))
        return PackedLinear(struct, self._arrays)

    def _merge(self, panels: Array, packed: Array, start: int, stop: int) -> None:
        """Rows `start` to `stop` of `packed` into the same rows of `panels`."""
        whole = slice(-(-start // LANES), stop // LANES)
        panels[whole] = packed[whole]
        for panel in {start // LANES, (stop - 1) // LANES} - set(range(whole.start, whole.stop)):
            kept = _rows_of(panel, start, stop)
            np.copyto(panels[panel], packed[panel], where=kept[self._lanes])


def _rows_of(panel: int, start: int, stop: int) -> Array:
    """Which of a panel's 16 rows lie between `start` and `stop`."""
    rows = np.arange(panel * LANES, (panel + 1) * LANES)
    found: Array = (rows >= start) & (rows < stop)
    return found


def _runs(rows: int, first: int, step: int) -> list[tuple[int, int]]:
    bounds = [0, *range(first, rows, step), rows] if first < rows else [0, rows]
    return list(pairwise(bounds))


def _lanes(kind: Kind) -> Array:
    """Which channel each item of a packed array's last axis belongs to (src/tiles.h)."""
    if kind == Kind.F32:
        return np.arange(LANES)
    steps = np.arange(LANES).repeat(4)
    halves = np.arange(LANES).repeat(2)
    return np.concatenate((np.tile(steps, 4), halves, halves) if kind == Kind.G4 else (np.tile(steps, 8), halves))


def _copy(array: Array, room: Room) -> Array:
    copy = room(array.shape, array.dtype)
    copy[...] = array
    return copy
