"""What keeps a late fill out of a cache node: a tombstone per root, and a generation per name.

A fill is: read (a miss) → compute → put. Between its miss and its put, what it was computed from may be invalidated.

- *Content-keyed entries* hold their root in the key, so a late one is never wrong, only a waste that would stay: while
  a root is buried, its puts are refused. A rollback lifts the tombstone.
- *Named entries* (one name, many versions over time) would be wrong. A miss tells the node's incarnation and its
  generation: a count of all deletes by name so far. A put brings both back and is refused if this node has another
  incarnation (it forgot what it had deleted) or has deleted that name since the miss.

Forgetting is safe. A tombstone goes only after the second delete, or after a time far above the longest deadline: no
fill begun before the first delete can then still run. A forgotten name is taken as deleted at the latest forgotten
generation, which refuses some fills that were sound.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass

from pdbus.errors import Conflict

FENCE_BYTES = 320
"""What one tombstone or name costs in memory, measured and rounded up; names of over 64 bytes cost a little more."""


@dataclass(frozen=True, slots=True)
class Fence:
    """What a miss tells, and a fill of a named entry brings back."""

    incarnation: str
    generation: int


@dataclass(slots=True)
class _Tombstone:
    since_s: float
    second: bool


class Fences:
    """The fences of one node.

    `incarnation`: of its memory; `limit`: how many of either kind to keep; `keep_s`: how long a tombstone stays.
    """

    def __init__(self, incarnation: str, limit: int, keep_s: float) -> None:
        self.incarnation = incarnation
        self.generation = 0
        self._limit = limit
        self._keep_s = keep_s
        self._tombstones: OrderedDict[bytes, _Tombstone] = OrderedDict()
        self._deleted: OrderedDict[str, int] = OrderedDict()
        """Name -> generation of its last delete, oldest first."""
        self._floor = 0
        """Names that are not in `_deleted` were last deleted at this generation or before."""

    def __len__(self) -> int:
        return len(self._tombstones) + len(self._deleted)

    @property
    def told(self) -> Fence:
        return Fence(self.incarnation, self.generation)

    def bury(self, root: bytes, now_s: float, second: bool) -> None:
        """No more fills of `root`. A second delete only marks the tombstone as one that may be forgotten."""
        known = self._tombstones.pop(root, None)
        self._tombstones[root] = _Tombstone(now_s, second or (known is not None and known.second))
        self._forget_roots(now_s)

    def lift(self, root: bytes) -> None:
        self._tombstones.pop(root, None)

    def buried(self, root: bytes) -> bool:
        return root in self._tombstones

    def bump(self, name: str, generation: int = 0) -> None:
        """A delete of `name`: fills that missed before now are refused. Never behind the log's own `generation`."""
        self.generation = max(self.generation + 1, generation)
        self._deleted.pop(name, None)
        self._deleted[name] = self.generation
        while len(self._deleted) > self._limit:
            self._floor = max(self._floor, self._deleted.popitem(last=False)[1])

    def check(self, root: bytes, name: str, fence: Fence | None) -> None:
        """Raises Conflict if a fill is too late. `fence`: what its miss told; needed for named entries only."""
        if root in self._tombstones:
            raise Conflict(f"root {root.hex()[:12]} was invalidated")
        if not name:
            return
        if fence is None or fence.incarnation != self.incarnation:
            raise Conflict("the cache node has restarted since the miss")
        if fence.generation < self._deleted.get(name, self._floor):
            raise Conflict("the name was invalidated since the miss")

    def _forget_roots(self, now_s: float) -> None:
        """Tombstones that are over their time, and, above the limit, the oldest after their second delete."""
        while self._tombstones and now_s - next(iter(self._tombstones.values())).since_s > self._keep_s:
            self._tombstones.popitem(last=False)
        over = len(self._tombstones) - self._limit
        if over > 0:
            deleted_twice = (root for root, tombstone in self._tombstones.items() if tombstone.second)
            for root in list(itertools.islice(deleted_twice, over)):
                del self._tombstones[root]
