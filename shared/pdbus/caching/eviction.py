"""Which entry to give up next: S3-FIFO, counted in bytes.

Three queues: new entries enter *small* (a tenth of the budget); those that were read again by the time they reach its
end move to *main*, the others leave and only their fingerprints stay for a while in *ghost*; a key that comes back
while its ghost is there enters main at once. Main goes round: an entry with hits is put back with one hit less.

Why this one: most prompts are asked once, and they leave through the small queue without pushing out what is in use
(frequency), while main ages by rotation (recency). A hit only raises a counter: nothing is reordered on the read path.
LRU keeps every one-time prompt for a full round; LFU keeps yesterday's favourites; W-TinyLFU does as well as this, but
with a sketch to size and to age.

Source: Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023. An entry moves to main after one hit
(the paper's text; its algorithm box says two): a put here is no access, so one hit is the second time it was wanted.
"""

from __future__ import annotations

from collections import OrderedDict

_SMALL_SHARE = 0.1
_MOST_HITS = 3


class _Node:
    __slots__ = ("hits", "size")

    def __init__(self, size: int, hits: int = 0) -> None:
        self.size = size
        self.hits = hits


class S3Fifo:
    """The order of eviction over keys with sizes in bytes. Holds no values. Not thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self._small_bytes_target = int(budget_bytes * _SMALL_SHARE)
        self._small: OrderedDict[bytes, _Node] = OrderedDict()
        self._main: OrderedDict[bytes, _Node] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._small_bytes = 0

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def add(self, key: bytes, size: int, hits: int | None = None) -> None:
        """Enters a new key; `hits`: of the entry that it replaces, which had its place in main if it had any."""
        if hits or self._ghost.pop(_fingerprint(key), self) is not self:
            self._main[key] = _Node(size, hits or 0)
        else:
            self._small[key] = _Node(size)
            self._small_bytes += size

    def hit(self, key: bytes) -> None:
        node = self._small.get(key) or self._main[key]
        node.hits = min(node.hits + 1, _MOST_HITS)

    def remove(self, key: bytes) -> int:
        """Takes a key out for another reason than room. Returns its hits."""
        node = self._small.pop(key, None)
        if node is None:
            return self._main.pop(key).hits
        self._small_bytes -= node.size
        return node.hits

    def evict(self) -> bytes:
        """Takes out the key to give up next. Raises KeyError when there is none."""
        while True:
            if self._small and (self._small_bytes > self._small_bytes_target or not self._main):
                key, node = self._small.popitem(last=False)
                self._small_bytes -= node.size
                if not node.hits:
                    self._remember(key)
                    return key
                self._main[key] = _Node(node.size)
            else:
                key, node = self._main.popitem(last=False)
                if not node.hits:
                    return key
                node.hits -= 1
                self._main[key] = node

    def _remember(self, key: bytes) -> None:
        self._ghost[_fingerprint(key)] = None
        while len(self._ghost) > len(self):  # so ghosts cost at most a fixed part of each entry's overhead
            self._ghost.popitem(last=False)


def _fingerprint(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")
