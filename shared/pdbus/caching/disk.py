"""The disk below a cache node's memory: segments appended to in turn, and an index of what they hold, by key and root.

Invariants, which `check` verifies:
- The files never take more than the budget.
- No entry is found that was deleted, or whose root was, also if it was being written meanwhile. Its record is marked
  (`sweep`), and the node's replay of the log of invalidations deletes it again after a restart, mark or not.
- An entry is found only under its kind ("kv"), until it expires; and by whoever asks under another root as in memory
  (caching/store.py), since a page's key holds the root of exactly what it depends on.

Room is made by giving up the oldest segment; what was read since it was written moves on to the newest one first.

The owner's thread alone calls everything but `write`, `read` and `sweep`, which touch files only and may take long.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable
from pathlib import Path

from pdbus.caching.disk_entry import DiskEntry, head_of
from pdbus.caching.entry import Entry
from pdbus.caching.segment import Segment
from pdbus.caching.segments import Segments

log = logging.getLogger(__name__)


class DiskStore:
    """`most_entries` bounds the index. `wall_s`: wall-clock seconds when the monotonic clock shows 0.

    Empty until `open`."""

    def __init__(self, folder: Path, budget_bytes: int, most_entries: int, wall_s: float) -> None:
        self.budget_bytes = budget_bytes
        self._files = Segments(folder, budget_bytes)
        self._most_entries = most_entries
        self._wall_s = wall_s
        self._entries: dict[bytes, DiskEntry] = {}
        self._by_root: dict[bytes, set[bytes]] = {}
        self._by_segment: dict[Segment, set[bytes]] = {}
        self._writing: dict[bytes, DiskEntry] = {}
        self._unmarked: list[DiskEntry] = []

    def open(self) -> None:
        """Finds what a former life left in the folder, by reading the heads. Raises OSError where it can't be used."""
        for segment, records in self._files.open():
            for offset, head in records[: self._most_entries - len(self)]:
                if head.key in self._entries:  # written again later, as it moved on
                    self._forget(self._entries[head.key])
                self._remember(DiskEntry.found(segment, offset, head, self._wall_s))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries or key in self._writing

    @property
    def used_bytes(self) -> int:
        return self._files.used_bytes

    def get(self, key: bytes, root: bytes, now_s: float, max_age_s: float | None = None) -> DiskEntry | None:
        """The entry, or None: absent, expired or too old. It then belongs to the reader's root."""
        entry = self._entries.get(key)
        if entry is None or now_s >= entry.expires_s:
            return None
        if max_age_s is not None and now_s - entry.stored_s > max_age_s:
            return None
        self.adopt(key, root)
        entry.hits += 1
        return entry

    def adopt(self, key: bytes, root: bytes) -> None:
        """From now on an entry, if there is one, belongs to `root`."""
        entry = self._entries.get(key)
        if entry is not None and entry.root != root:
            self._unroot(entry)
            entry.root = root
            self._by_root.setdefault(root, set()).add(key)

    def fits(self, entry: Entry) -> bool:
        """Whether it may be written at all."""
        return head_of(entry, self._wall_s).record_bytes <= self._files.segment_bytes // 2

    def begin(self, entry: Entry) -> DiskEntry | None:
        """A place for the entry, for `write` to fill and `commit` to make known. None: `retire` has to make room."""
        head = head_of(entry, self._wall_s)
        if len(self) + len(self._writing) >= self._most_entries:
            return None
        place = self._files.reserve(head.record_bytes)
        if place is None:
            return None
        expires_s = head.expires_s - self._wall_s
        placed = DiskEntry(*place, head, entry.root, entry.stored_s, expires_s)
        self._writing[entry.key] = placed
        return placed

    @staticmethod
    def write(entry: DiskEntry, value: bytes) -> None:
        """Raises OSError; `commit` is to be told so."""
        entry.head = entry.segment.write(entry.offset, entry.head, value)

    def commit(self, entry: DiskEntry, written: bool = True) -> bool:
        """Makes a written entry findable. False: it was deleted meanwhile, or could not be written."""
        key = entry.key
        if self._writing.get(key) is entry:
            del self._writing[key]
        if not written:
            self._files.stop_appending(entry.segment)
            return False
        if entry.void:
            self._unmarked.append(entry)
            return False
        if key in self._entries:  # it moves on from its old place
            self._forget(self._entries[key])
        self._remember(entry)
        return True

    def retire(self) -> list[DiskEntry]:
        """Begins to give up the oldest segment: forgets its entries, but for those to be moved on: written again, as
        far as they have been read since. `remove_retired` comes after that."""
        segment = self._files.retire()
        keys = self._by_segment.get(segment, set()) if segment else set()
        hot = sorted((self._entries[key] for key in keys if self._entries[key].hits), key=lambda entry: -entry.hits)
        room, kept = self._files.segment_bytes // 4, []
        for entry in hot:
            room -= entry.head.record_bytes
            if room >= 0:
                kept.append(entry)
        for key in keys - {entry.key for entry in kept}:
            self._forget(self._entries[key])
        return kept

    def remove_retired(self) -> None:
        """Deletes its file, and forgets what did not move on."""
        for segment in self._files.remove_retired():
            for key in list(self._by_segment.get(segment, ())):
                self._forget(self._entries[key])

    @staticmethod
    def read(entry: DiskEntry) -> memoryview:
        """Its value as stored, which stays valid. Raises Corrupt: then it is to be deleted."""
        return entry.segment.read(entry.offset, entry.head)

    def delete(self, keys: Iterable[bytes]) -> int:
        """Deletes by key, also what is being written; returns how many were there."""
        found = [place[key] for key in set(keys) for place in (self._entries, self._writing) if key in place]
        for entry in found:
            self._void(entry)
        if found:
            writing = (entry.segment for entry in self._writing.values())
            self._files.remove_all_but({*self._by_segment, *writing})
        return len(found)

    def delete_root(self, root: bytes) -> int:
        being_written = [entry.key for entry in self._writing.values() if entry.root == root]
        return self.delete([*self._by_root.get(root, ()), *being_written])

    def expire(self, now_s: float) -> int:
        """Deletes what is over its time; returns how many."""
        return self.delete([key for key, entry in self._entries.items() if now_s >= entry.expires_s])

    def clear(self) -> None:
        """Deletes everything at once."""
        for entry in [*self._entries.values(), *self._writing.values()]:
            entry.void = True
        for index in (self._entries, self._by_root, self._by_segment, self._writing):
            index.clear()
        self._unmarked.clear()
        self._files.clear()

    def scan(self, after: bytes, limit: int, root: bytes = b"") -> tuple[list[DiskEntry], bool]:
        """As Store.scan."""
        keys: Iterable[bytes] = self._by_root.get(root, ()) if root else self._entries
        found = heapq.nsmallest(limit + 1, (key for key in keys if key > after))
        return [self._entries[key] for key in found[:limit]], len(found) > limit

    def peek(self, key: bytes) -> DiskEntry | None:
        """`get` without asking for anything: it changes nothing, and an entry over its time is found too."""
        return self._entries.get(key)

    def unmarked(self) -> list[DiskEntry]:
        """Deleted entries whose records don't say so yet; they are handed out once, for `sweep`."""
        found, self._unmarked = self._unmarked, []
        return [entry for entry in found if entry.segment in self._files]

    @staticmethod
    def sweep(entries: Iterable[DiskEntry]) -> None:
        for entry in entries:
            try:
                entry.segment.mark_deleted(entry.offset)
            except OSError:  # its segment is gone meanwhile, or the disk is broken: a restart finds it by the log
                log.debug("a deleted record of %s was not marked", entry.segment.path)

    def check(self) -> None:
        """Verifies the invariants; raises AssertionError."""
        assert self.used_bytes <= self.budget_bytes
        keys = sorted(self._entries)
        for index in (self._by_root, self._by_segment):
            assert sorted(key for group in index.values() for key in group) == keys
        assert not any(entry.void for entry in self._entries.values())
        assert all(segment in self._files for segment in self._by_segment)

    def _remember(self, entry: DiskEntry) -> None:
        key = entry.key
        self._entries[key] = entry
        self._by_root.setdefault(entry.root, set()).add(key)
        self._by_segment.setdefault(entry.segment, set()).add(key)

    def _forget(self, entry: DiskEntry) -> None:
        key = entry.key
        del self._entries[key]
        self._unroot(entry)
        keys = self._by_segment[entry.segment]
        keys.discard(key)
        if not keys:
            del self._by_segment[entry.segment]

    def _unroot(self, entry: DiskEntry) -> None:
        keys = self._by_root[entry.root]
        keys.discard(entry.key)
        if not keys:
            del self._by_root[entry.root]

    def _void(self, entry: DiskEntry) -> None:
        entry.void = True
        if self._entries.get(entry.key) is entry:
            self._forget(entry)
            self._unmarked.append(entry)
