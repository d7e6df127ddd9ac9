"""What a row log says beyond the sealed blocks: the newest values of each row that it names."""

from __future__ import annotations

import numpy as np

from pdbus.errors import Overloaded
from pdbus.weights.blocks import Array

_FIRST_ROWS = 1024
_ROW_BYTES = 16


class RowOverlay:
    """Of a table [rows, width], as of the log's sequence `seq`: all entries up to it count, none after it.

    `floor`: entries up to it are in the blocks below. Bounded by `most_bytes`, beside which each row of the table has a
    slot number; that memory is taken as rows are touched. For one thread."""

    def __init__(self, rows: int, width: int, floor: int, most_bytes: int) -> None:
        self.seq = self.floor = floor
        self._most = max(1, most_bytes // (_ROW_BYTES + 4 * width))
        self._slots = np.zeros(rows, np.int32)
        """Of each row of the table its slot + 1; 0: it has none."""
        self._used = 0
        self._ids = np.empty(0, np.int64)
        self._seqs = np.empty(0, np.int64)
        self._values = np.empty((0, width), np.float32)

    def __len__(self) -> int:
        return self._used

    @property
    def ids(self) -> Array:
        """The rows that it has, in no order."""
        return self._ids[: self._used]

    @property
    def nbytes(self) -> int:
        return self._ids.nbytes + self._seqs.nbytes + self._values.nbytes

    def apply(self, seq: int, ids: Array, values: Array) -> None:
        """Folds in an entry, each of whose ids comes once; one that was folded in before changes nothing.

        Raises Overloaded, and is as it was, where it would hold more rows than it may."""
        if seq <= self.seq:
            return
        slots = self._slots[ids]
        new = ids[slots == 0]
        self._reserve(self._used + len(new))
        self._slots[new] = np.arange(self._used + 1, self._used + 1 + len(new), dtype=np.int32)
        self._ids[self._used : self._used + len(new)] = new
        self._used += len(new)
        at = self._slots[ids] - 1
        self._values[at] = values
        self._seqs[at] = seq
        self.seq = seq

    def skip(self, seq: int) -> None:
        """An entry that says nothing."""
        self.seq = max(self.seq, seq)

    def read(self, ids: Array, out: Array) -> Array:
        """Writes the rows that it has into `out` [ids, width]; returns the positions of those that it lacks."""
        slots = self._slots[ids]
        found = np.flatnonzero(slots)
        out[found] = self._values[slots[found] - 1]
        return np.flatnonzero(slots == 0)

    def drop(self, seq: int) -> None:
        """Entries up to `seq` are in the blocks from now on: rows with nothing newer go."""
        keep = np.flatnonzero(self._seqs[: self._used] > seq)
        self._slots[self.ids] = 0
        self._ids, self._seqs, self._values = self._ids[keep], self._seqs[keep], self._values[keep]
        self._used = len(keep)
        self._slots[self._ids] = np.arange(1, self._used + 1, dtype=np.int32)
        self.floor = max(self.floor, seq)
        self.seq = max(self.seq, seq)

    def _reserve(self, rows: int) -> None:
        if rows > self._most:
            raise Overloaded(f"{self._most} rows wait to be sealed: seal the table", retry_after_s=1.0)
        if rows <= len(self._ids):
            return
        room = min(self._most, max(rows, 2 * len(self._ids), _FIRST_ROWS))
        for name in ("_ids", "_seqs", "_values"):
            old = getattr(self, name)
            grown = np.empty((room, *old.shape[1:]), old.dtype)
            grown[: self._used] = old[: self._used]
            setattr(self, name, grown)
