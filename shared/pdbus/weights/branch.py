"""Entries of a staging branch: how values become entries, and what the entries make of a tensor's blocks. Pure.

Whoever applies the same entries in the same order to the same blocks gets the same bits: of two that set an element the
later one counts, and those that add are added one after the other, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

import numpy as np

from pdbus.errors import Corrupt, InvalidRequest
from pdbus.messages.updates import BranchEntry
from pdbus.weights.blocks import Array, rows_per_block
from pdbus.weights.layer import Tensor

How: TypeAlias = Literal["set", "add"]
Where: TypeAlias = Literal["run", "rows", "elements"]
ENTRY_BYTES = 512 << 10
"""Of the values and indices of one entry, at most: what is larger becomes several."""
_AT, _VALUE = np.dtype("<u8"), np.dtype("<f4")


def run_entries(tensor: Tensor, how: How, values: Array) -> Iterator[BranchEntry]:
    """Of the whole tensor."""
    flat = values.reshape(-1)
    step = ENTRY_BYTES // _VALUE.itemsize
    for start in range(0, len(flat), step):
        yield _entry(tensor, how, "run", np.array([start]), flat[start : start + step])


def row_entries(tensor: Tensor, how: How, ids: Array, values: Array) -> Iterator[BranchEntry]:
    """Of rows by index; values [ids, …]. Raises InvalidRequest where not even one row fits an entry."""
    row = _row_elements(tensor)
    step = ENTRY_BYTES // (row * _VALUE.itemsize + _AT.itemsize)
    if not step:
        raise InvalidRequest(f"a row of {tensor.name} is too long for an entry: give elements", param=tensor.name)
    for start in range(0, len(ids), step):
        yield _entry(tensor, how, "rows", ids[start : start + step], values[start : start + step])


def element_entries(tensor: Tensor, how: How, ids: Array, values: Array) -> Iterator[BranchEntry]:
    """Of elements by index into the flattened tensor; values [ids]."""
    step = ENTRY_BYTES // (_VALUE.itemsize + _AT.itemsize)
    for start in range(0, len(ids), step):
        yield _entry(tensor, how, "elements", ids[start : start + step], values[start : start + step])


class Change:
    """An entry, laid out on the blocks of its tensor."""

    def __init__(self, entry: BranchEntry, tensor: Tensor) -> None:
        """Raises Corrupt where it does not fit the tensor."""
        if len(entry.at) % _AT.itemsize or len(entry.values) % _VALUE.itemsize or tensor.dtype != "fp32":
            raise Corrupt(f"an entry for {tensor.name} can't be read")
        self._add = entry.how == "add"
        at, values = np.frombuffer(entry.at, _AT), np.frombuffer(entry.values, _VALUE)
        row, elements = _row_elements(tensor), int(np.prod(tensor.shape, dtype=np.int64))
        width = {"run": len(values), "rows": row, "elements": 1}[entry.where]
        stop = elements - width + 1 if entry.where == "run" else elements // width
        if len(at) * width != len(values) or (len(at) and int(at.max()) >= stop):
            raise Corrupt(f"an entry for {tensor.name} does not fit it")
        starts = at.astype(np.int64) * (1 if entry.where == "run" else width)
        flat = (starts[:, None] + np.arange(width)).reshape(-1)
        per_block = rows_per_block(tensor.shape, tensor.dtype) * row
        self._pieces = dict(_split(flat, values, per_block))

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indices of those that it changes."""
        return tuple(self._pieces)

    def apply(self, blocks: Mapping[int, Array]) -> None:
        """Changes these in place: each flat, of all its elements."""
        for index, (at, values) in self._pieces.items():
            if self._add:
                blocks[index][at] += values
            else:
                blocks[index][at] = values


def _split(flat: Array, values: Array, per_block: int) -> Iterator[tuple[int, tuple[Array, Array]]]:
    """By block, the places within it and their values."""
    which = flat // per_block
    for index in np.unique(which):
        chosen = which == index
        yield int(index), (flat[chosen] - index * per_block, values[chosen])


def _entry(
    tensor: Tensor, how: How, where: Literal["run", "rows", "elements"], at: Array, values: Array
) -> BranchEntry:
    return BranchEntry(tensor.name, how, where, at.astype(_AT).tobytes(), values.astype(_VALUE).tobytes())


def _row_elements(tensor: Tensor) -> int:
    return max(1, int(np.prod(tensor.shape[1:], dtype=np.int64)))
