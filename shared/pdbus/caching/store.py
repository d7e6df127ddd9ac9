"""The memory of one cache node: bounded, indexed by root and name, fenced against late fills.

Invariants, which `check` verifies and a model test drives through every interleaving:
- `used_bytes` (entries and fences) never exceeds the budget, not even within `put`.
- No entry of a buried root is held; no named entry is held that was computed before its name's last delete.
- An entry is in exactly one place of each index: keys, eviction order, its root, its name, its expiry bucket.

One owner mutates it, on one thread, without an await between a check and the change that relies on it. All times are
seconds on one monotonic clock, passed in.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Protocol, TypeVar

from pdbus.caching.entry import Entry
from pdbus.caching.eviction import S3Fifo
from pdbus.caching.fences import FENCE_BYTES, Fence, Fences
from pdbus.messages.cache import Kind

G = TypeVar("G")

_BUCKET_S = 10
_LARGEST_SHARE = 16
_FENCE_SHARE = 8
TOMBSTONE_S = 86_400.0
"""As long as the log of invalidations keeps its entries, so that a restarted node buries the same roots."""


class Below(Protocol):
    """A slower tier: takes what the memory gives up, and forgets whatever the memory has to forget."""

    def offer(self, entry: Entry, *, given_up: bool) -> None:
        """An entry that was read, or is given up now. It may be kept or not; quick."""

    def delete(self, keys: Iterable[bytes]) -> int: ...

    def delete_root(self, root: bytes) -> int: ...

    def clear(self) -> None: ...


class Store:
    """Bounded memory of cache entries. `incarnation`: of this memory; a new one after every loss of it.

    All that deletes here deletes in the tier `below` too, so that no tier serves what another was told to forget."""

    def __init__(self, budget_bytes: int, incarnation: str, below: Below | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.evicted = 0
        """Entries given up for room since the start."""
        self._below = below
        self._empty(incarnation)

    def clear(self, incarnation: str) -> None:
        """Forgets everything, fences too; fills that missed before are refused by the new incarnation."""
        self._empty(incarnation)
        if self._below:
            self._below.clear()

    def _empty(self, incarnation: str) -> None:
        limit = max(64, self.budget_bytes // _FENCE_SHARE // FENCE_BYTES // 2)
        self.fences = Fences(incarnation, limit, TOMBSTONE_S)
        self._entries: dict[bytes, Entry] = {}
        self._order = S3Fifo(self.budget_bytes)
        self._by_root: dict[bytes, set[bytes]] = {}
        self._by_name: dict[str, set[bytes]] = {}
        self._by_expiry: dict[int, set[bytes]] = {}
        self._entry_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    @property
    def used_bytes(self) -> int:
        return self._entry_bytes + len(self.fences) * FENCE_BYTES

    def get(self, kind: Kind, key: bytes, root: bytes, now_s: float, max_age_s: float | None = None) -> Entry | None:
        """The entry, or None: absent, expired, older than `max_age_s`, or of another kind or root.

        A page of KV may be read under another root than the one it was stored under: its key holds the root of exactly
        the weights that it depends on. It then belongs to the reader's root, so that it outlives the older one.
        """
        entry = self._entries.get(key)
        if entry is None or entry.kind != kind:
            return None
        if now_s >= entry.expires_s:
            self._remove(key)
            return None
        if max_age_s is not None and now_s - entry.stored_s > max_age_s:
            return None
        if entry.root != root:
            if kind != "kv":
                return None
            self._adopt(entry, root)
        self._order.hit(key)
        if self._below:
            self._below.offer(entry, given_up=False)
        return entry

    def admit(self, root: bytes, name: str, fence: Fence | None, charge: int) -> bool:
        """Whether a fill of this size would be kept. Raises Conflict if it is fenced."""
        self.fences.check(root, name, fence)
        return charge <= self.budget_bytes // _LARGEST_SHARE

    def put(self, entry: Entry, fence: Fence | None = None) -> bool:
        """Stores or replaces an entry, giving up others for room. False: it is too large to be worth that.

        `fence`: what the fill's miss told; without one, a named entry is refused. Raises Conflict if it is fenced.
        """
        if not self.admit(entry.root, entry.name, fence, entry.charge):
            return False
        hits = self._remove(entry.key) if entry.key in self._entries else None
        if not self._make_room(entry.charge):
            return False
        root_keys = self._by_root.setdefault(entry.root, set())
        root_keys.add(entry.key)
        self._entries[entry.key] = entry
        self._order.add(entry.key, entry.charge, hits)
        if entry.name:
            self._by_name.setdefault(entry.name, set()).add(entry.key)
        self._by_expiry.setdefault(_bucket(entry.expires_s), set()).add(entry.key)
        self._entry_bytes += entry.charge
        return True

    def delete(self, keys: Iterable[bytes]) -> int:
        """Deletes by key, in every tier; returns how many there were, counted in each."""
        keys = tuple(keys)
        deleted = self._below.delete(keys) if self._below else 0
        return deleted + self._delete_here(keys)

    def delete_root(self, root: bytes) -> int:
        """Deletes all that was made from `root`, without a tombstone."""
        deleted = self._below.delete_root(root) if self._below else 0
        return deleted + self._delete_here(tuple(self._by_root.get(root, ())))

    def bury(self, root: bytes, now_s: float, second: bool) -> int:
        """Deletes all that was made from `root` and refuses its fills until `lift`."""
        self.fences.bury(root, now_s, second)
        deleted = self.delete_root(root)
        self._make_room(0)
        return deleted

    def lift(self, root: bytes) -> None:
        """A rollback made `root` live again."""
        self.fences.lift(root)

    def delete_name(self, name: str, generation: int = 0) -> int:
        """Deletes the entries of a name, and refuses fills whose miss came before now."""
        self.fences.bump(name, generation)
        deleted = self.delete(tuple(self._by_name.get(name, ())))
        self._make_room(0)
        return deleted

    def expire(self, now_s: float) -> int:
        """Deletes what is over its time; returns how many. To be called now and then: a read never gives one anyway."""
        over = [bucket for bucket in self._by_expiry if (bucket + 1) * _BUCKET_S <= now_s]
        return sum(self._delete_here(tuple(self._by_expiry[bucket])) for bucket in over)

    def scan(self, after: bytes, limit: int, root: bytes = b"") -> tuple[list[Entry], bool]:
        """Up to `limit` entries in key order after key `after`, of one root if given; and whether there are more."""
        keys: Iterable[bytes] = self._by_root.get(root, ()) if root else self._entries
        found = heapq.nsmallest(limit + 1, (key for key in keys if key > after))
        return [self._entries[key] for key in found[:limit]], len(found) > limit

    def check(self) -> None:
        """Verifies the invariants; raises AssertionError."""
        keys = set(self._entries)
        assert self._entry_bytes == sum(entry.charge for entry in self._entries.values())
        assert self.used_bytes <= self.budget_bytes or not keys
        assert len(self._order) == len(keys)
        for index in (self._by_root, self._by_expiry):
            assert sorted(key for group in index.values() for key in group) == sorted(keys)
        assert {key for group in self._by_name.values() for key in group} == {k for k in keys if self._entries[k].name}
        assert not any(self.fences.buried(root) for root in self._by_root)

    def _delete_here(self, keys: Iterable[bytes]) -> int:
        present = [key for key in keys if key in self._entries]
        for key in present:
            self._remove(key)
        return len(present)

    def _make_room(self, room: int) -> bool:
        while self._entries and self.used_bytes + room > self.budget_bytes:
            key = self._order.evict()
            if self._below:
                self._below.offer(self._entries[key], given_up=True)
            self._unindex(key)
            self.evicted += 1
        return self.used_bytes + room <= self.budget_bytes

    def _adopt(self, entry: Entry, root: bytes) -> None:
        if self.fences.buried(root):
            return
        _discard(self._by_root, entry.root, entry.key)
        entry.root = root
        self._by_root.setdefault(root, set()).add(entry.key)

    def _remove(self, key: bytes) -> int:
        self._unindex(key)
        return self._order.remove(key)

    def _unindex(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._entry_bytes -= entry.charge
        _discard(self._by_root, entry.root, key)
        _discard(self._by_expiry, _bucket(entry.expires_s), key)
        if entry.name:
            _discard(self._by_name, entry.name, key)


def _bucket(at_s: float) -> int:
    return int(at_s // _BUCKET_S)


def _discard(index: dict[G, set[bytes]], group: G, key: bytes) -> None:
    keys = index[group]
    keys.discard(key)
    if not keys:
        del index[group]
