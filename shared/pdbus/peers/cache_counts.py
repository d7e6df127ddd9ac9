"""What a process reads from cache nodes and writes to them, as metrics."""

from __future__ import annotations

from collections.abc import Mapping

from pdbus.messages.cache import Kind
from pdbus.telemetry.spans import meter


class CacheCounts:
    def __init__(self) -> None:
        self._reads = meter().create_counter("pdbus.cache.reads", unit="{entry}")
        self._writes = meter().create_counter("pdbus.cache.writes", unit="{entry}")

    def read(self, kind: Kind, hits: Mapping[str, int], failed: int, asked: int) -> None:
        """`hits`: by the tier of the node that had them, "memory" or "disk"; `failed`: no node answered."""
        for tier, count in hits.items():
            if count:
                self._reads.add(count, {"kind": kind, "outcome": "hit", "tier": tier})
        for outcome, count in (("failed", failed), ("miss", asked - sum(hits.values()) - failed)):
            if count:
                self._reads.add(count, {"kind": kind, "outcome": outcome})

    def write(self, kind: Kind, outcome: str) -> None:
        self._writes.add(1, {"kind": kind, "outcome": outcome})
