"""Consistent hashing: which cache nodes hold a key, the same answer in every process.

Each node stands at `POINTS` places of a circle of 64-bit numbers (virtual nodes, so that loads even out); a key belongs
to the first R different nodes at or after its own place. When a node leaves, its keys go to the nodes that came next
for them, which already held the replicas; when one joins, it takes about 1/n of the keys and no other key moves.

Source: Karger et al., "Consistent Hashing and Random Trees", STOC 1997; replicas as in Dynamo (SOSP 2007).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from pdbus import canonical

POINTS = 128
"""Places of one node: the share of a node then deviates by about 1/sqrt(128), 9 %, from the mean."""


class HashRing:
    """An immutable ring over node names. Order and repetition of `nodes` don't matter."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.nodes = tuple(sorted(set(nodes)))
        placed = sorted((point, node) for node in self.nodes for point in _points(node))
        self._points = [point for point, _ in placed]
        self._owners = [node for _, node in placed]

    def owners(self, key: bytes, count: int) -> tuple[str, ...]:
        """The `count` different nodes that hold `key`, primary first; fewer where the ring has fewer."""
        count = min(count, len(self.nodes))
        found: list[str] = []
        at = bisect.bisect_left(self._points, _place(key))
        while len(found) < count:
            node = self._owners[at % len(self._owners)]
            if node not in found:
                found.append(node)
            at += 1
        return tuple(found)


def _place(key: bytes) -> int:
    return int.from_bytes(canonical.digest(["pdbus ring key", key])[:8], "big")


def _points(node: str) -> list[int]:
    """Eight bytes each of a few digests: one SHA-256 gives four places."""
    per_digest = canonical.DIGEST_BYTES // 8
    digests = (canonical.digest(["pdbus ring node", node, turn]) for turn in range(POINTS // per_digest))
    return [int.from_bytes(value[at : at + 8], "big") for value in digests for at in range(0, len(value), 8)]
