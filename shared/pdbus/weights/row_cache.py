"""Some rows of a table beside its log: read once, then kept as new as the log.

A row that isn't there is reserved first and read then: entries of the log that come in between are kept for it, and
what was read counts only if it holds everything that came before the reservation (its fence). So a fill that raced an
update can't bring back an older value.
"""

from __future__ import annotations

import numpy as np

from pdbus.weights.blocks import Array

_ROW_BYTES = 160
"""Beside the values: arrays and a dictionary's entry."""


class RowCache:
    """At most `most_bytes` of rows of `width` columns, as of the log's sequence `seq` or later. For one thread.

    Full, it gives up rows that were not asked for since its hand passed by last (second chance)."""

    def __init__(self, width: int, most_bytes: int, seq: int = 0) -> None:
        self.seq = seq
        self._room = max(1, most_bytes // (_ROW_BYTES + 4 * width))
        self._slots: dict[int, int] = {}
        self._ids = np.full(self._room, -1, np.int64)
        self._seqs = np.empty(self._room, np.int64)
        """Sequence of a row's values; before there are any, its fence."""
        self._filled = np.zeros(self._room, bool)
        self._wanted = np.zeros(self._room, bool)
        self._values = np.empty((self._room, width), np.float32)
        self._hand = 0

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self, seq: int) -> None:
        """Nothing that is known counts any more; the log goes on after `seq`."""
        self._slots.clear()
        self._ids.fill(-1)
        self._filled.fill(False)
        self.seq = seq

    def read(self, ids: Array, out: Array) -> Array:
        """Writes the rows that are there into `out` [ids, width]; returns the positions of the others."""
        slots = self._slots_of(ids)
        here = slots >= 0
        here[here] = self._filled[slots[here]]
        found = slots[here]
        out[here] = self._values[found]
        self._wanted[found] = True
        return np.flatnonzero(~here)

    def reserve(self, ids: Array) -> None:
        """These rows are going to be read, now: from here on the log's entries are kept for them."""
        for row in ids.tolist():
            if row not in self._slots:
                slot = self._free_slot()
                self._slots[row] = slot
                self._ids[slot], self._seqs[slot] = row, self.seq
                self._filled[slot] = self._wanted[slot] = False  # wanted once it is asked for again

    def fill(self, seq: int, ids: Array, values: Array) -> None:
        """What was read, as of `seq`. Rows that know something newer keep it; those not reserved before don't count."""
        slots = self._slots_of(ids)
        due = (slots >= 0) & (self._seqs[slots] <= seq)
        slots = slots[due]
        self._values[slots] = values[due]
        self._seqs[slots] = seq
        self._filled[slots] = True

    def apply(self, seq: int, ids: Array, values: Array) -> None:
        """The log's next entry, each id once; one that came before changes nothing."""
        if seq <= self.seq:
            return
        self.seq = seq
        slots = self._slots_of(ids)
        due = (slots >= 0) & (self._seqs[slots] < seq)
        slots = slots[due]
        self._values[slots] = values[due]
        self._seqs[slots] = seq
        self._filled[slots] = True

    def skip(self, seq: int) -> None:
        """An entry that says nothing."""
        self.seq = max(self.seq, seq)

    def _slots_of(self, ids: Array) -> Array:
        get = self._slots.get
        return np.fromiter((get(row, -1) for row in ids.tolist()), np.int64, len(ids))

    def _free_slot(self) -> int:
        while True:
            slot = self._hand
            self._hand = (self._hand + 1) % self._room
            row = int(self._ids[slot])
            if row >= 0 and self._wanted[slot]:
                self._wanted[slot] = False
                continue
            if row >= 0:
                del self._slots[row]
            return slot
