"""Looks at samples of what the caches hold, and compares them with both logs: nothing deleted may still be there.

It can only find what should not happen; the fences of the caches are what correctness rests on.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.canonical import DIGEST_BYTES
from pdbus.context import LONGEST_DEADLINE_S, Deadline, RequestContext
from pdbus.invalidator.caches import fence_of
from pdbus.invalidator.deletions import NS, Deletions
from pdbus.invalidator.log import DeletionsFollower
from pdbus.messages.cache import CacheScan, ScannedEntry
from pdbus.messages.common import Digest
from pdbus.peers.history import HistoryFollower
from pdbus.subjects import CACHE_SCAN
from pdbus.telemetry.spans import meter
from pdbus.weights.history import History

log = logging.getLogger(__name__)

Opinion: TypeAlias = Literal["sound", "named", "unknown", "violation"]
"""unknown: of a root that this model's log doesn't know, and nobody deleted: another model's, on a shared node."""

GRACE_S = 15.0
"""So long after a delete was logged nodes may still have to read of it: three times what they may lag behind."""
_ROUND_S = 5.0
_SCAN_S = 2.0
_LOG_S = 5.0
_MOST = 1024
_LINGER_S = LONGEST_DEADLINE_S + 120.0
"""Requests pin a version for as long, and wishes keep it a little longer."""


def opinion_of(entry: ScannedEntry, deletions: Deletions, history: History, now_ns: int) -> Opinion:
    """Of an entry that a node holds. Pure."""
    if fence_of(entry.kind, entry.name) == "name":
        return "named"
    buried = deletions.buried(entry.root)
    if buried and now_ns - buried.since_ns > GRACE_S * NS:
        return "violation"
    known = entry.root in history.roots or entry.root in history.gone or buried
    return "sound" if known else "unknown"


def opinion_of_version(root: Digest, history: History, now_ns: int) -> Opinion:
    """Of a version that a worker of this model has loaded. Pure."""
    if root in history.roots:
        return "sound"
    gone = history.gone.get(root)
    lately = gone and gone.left and now_ns - gone.left.time_ns <= _LINGER_S * NS
    return "sound" if lately or not history.seq else "violation"


@dataclass
class Audit:
    """Counts what it has seen, and what of it should not have been there."""

    bus: Bus
    fleet: Fleet
    history: HistoryFollower
    log: DeletionsFollower
    model: str
    per_s: float

    def __post_init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.violations: Counter[str] = Counter()
        self._audited = meter().create_counter("pdbus.invalidator.audited", "{entry}", "Cache entries looked at")
        self._found = meter().create_counter("pdbus.invalidator.violations", "{entry}", "Entries of deleted versions")
        self._rng = random.Random()  # noqa: S311 - which node is next

    @property
    def told(self) -> str:
        """For people."""
        total = sum(self.seen.values())
        if not total:
            return ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.seen.items()))
        return f"audited {total} entries ({kinds}): {sum(self.violations.values())} violations"

    async def run(self) -> None:
        """Until it is cancelled; `per_s` entries a second. Raises PdbusError."""
        while self.per_s:
            await asyncio.sleep(_ROUND_S)
            await self.look(min(_MOST, max(1, int(self.per_s * _ROUND_S))))
        await asyncio.Event().wait()

    async def look(self, most: int) -> None:
        """At that many entries of one node, and at the versions of all workers. Raises PdbusError.

        First at what is there, then at the logs: whatever was let in by then is known when it is judged."""
        workers = [card for service in ("prefill", "decode") for card in self.fleet.live(service)]
        nodes = [card.id for card in self.fleet.live("cache") if card.state == "ready"]
        node = self._rng.choice(nodes) if nodes else ""
        entries = await self._entries(node, most) if node else []
        deadline = Deadline.after(_LOG_S)
        await self.history.caught_up(deadline)
        await self.log.caught_up(deadline)
        now_ns = time.time_ns()
        for entry in entries:
            opinion = opinion_of(entry, self.log.deletions, self.history.history, now_ns)
            self._count(entry.kind, opinion, f"cache node {node}", entry.root)
        for card in workers:
            for root in card.roots if card.model == self.model else ():
                opinion = opinion_of_version(root, self.history.history, now_ns)
                self._count("model", opinion, f"{card.service} worker {card.id}", root)

    async def _entries(self, node: str, most: int) -> list[ScannedEntry]:
        """From a random key on, and from the first one where there are too few behind it. Raises PdbusError."""
        found: dict[Digest, ScannedEntry] = {}
        for after in (secrets.token_bytes(DIGEST_BYTES), b""):
            if len(found) < most:
                wanted = CacheScan(after, most - len(found))
                reply = await self.bus.call(CACHE_SCAN(node=node), wanted, RequestContext.after(_SCAN_S))
                found |= {entry.key: entry for entry in reply.entries}
        return list(found.values())

    def _count(self, kind: str, opinion: Opinion, where: str, root: Digest) -> None:
        self.seen[kind] += 1
        self._audited.add(1, {"kind": kind, "opinion": opinion})
        if opinion == "violation":
            self.violations[kind] += 1
            self._found.add(1, {"kind": kind})
            log.error("%s holds a %s entry of version %s, which was deleted", where, kind, root.hex()[:12])
