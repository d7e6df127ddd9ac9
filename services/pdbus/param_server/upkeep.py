"""Keeps a param-server complete, and has it serve in the groups of those shards only that it holds all of."""

from __future__ import annotations

import asyncio
import logging
import time

from pdbus.bus.presence import Fleet
from pdbus.context import LONGEST_DEADLINE_S
from pdbus.errors import PdbusError
from pdbus.messages.common import Digest
from pdbus.param_server.heat import changed_blocks
from pdbus.param_server.holdings import Gap, Holdings
from pdbus.param_server.reclaim import Reclaimer
from pdbus.param_server.repair import Repair
from pdbus.param_server.serving import BlockServer
from pdbus.param_server.settings import SERVICE, ParamServerSettings
from pdbus.param_server.staging import Staging
from pdbus.param_server.store import BlockStore
from pdbus.param_server.watcher import Watcher
from pdbus.peers.history import HistoryFollower
from pdbus.weights.history import History
from pdbus.weights.log_state import RETENTION_S
from pdbus.weights.placement import duties

log = logging.getLogger(__name__)

RECLAIM_S = RETENTION_S + LONGEST_DEADLINE_S
"""Only after that are the blocks of a root deleted: an update that rests on it may still be open until then."""
_RECLAIM_EVERY_S = 30.0
GONE_S = 15.0
"""A member not seen for so long counts as gone: until it is back, others hold its shards too."""
SCRUB_BYTES = 16 << 20
"""Checked on disk at each look that nothing else caused: 3 MB/s, a small model in minutes."""


class Upkeep(Watcher):
    """`round` is one look at the store and what follows from it."""

    POLL_S = 5.0

    def __init__(
        self,
        settings: ParamServerSettings,
        store: BlockStore,
        server: BlockServer,
        repair: Repair,
        staging: Staging,
        follower: HistoryFollower,
        fleet: Fleet,
    ) -> None:
        super().__init__(follower)
        self._settings = settings
        self._store = store
        self._holdings = Holdings(store)
        self._server = server
        self._repair = repair
        self._staging = staging
        self._reclaimer = Reclaimer(store)
        self._reclaim_at_s = 0.0
        self._forgotten = 0
        self._counted = 0
        """Sequence of the last commit whose changes were counted."""
        self._fleet = fleet
        self.roots: tuple[Digest, ...] = ()
        """The versions of which this server holds all that it has to."""
        self.detail = ""
        """What is lacking, and why."""
        self._said = ""
        self._seen: dict[str, float] = {}
        self._started = time.monotonic()
        server.on_spoilt = self._news.set

    def duties(self) -> frozenset[int]:
        """The shards that this server has to hold now."""
        now = time.monotonic()
        self._seen.update((card.id, now) for card in self._fleet.live(SERVICE) if card.model == self._settings.model)
        members = self._follower.history.members
        present = [member for member in members if now - self._seen.get(member, self._started) < GONE_S]
        return duties(self._settings.id, members, present)

    async def round(self) -> bool:
        """Fetches what is lacking. Returns whether nothing is any more; `detail` says what is."""
        try:
            gap = await self._close(await self._look())
        except PdbusError as error:  # of the disk, say
            self._say(error.message)
            return False
        lacking = f"lacks {len(gap.blocks)} blocks and {len(gap.roots)} manifests: {self._repair.reason}"
        self._say("" if gap.closed else lacking)
        return gap.closed

    async def _close(self, gap: Gap) -> Gap:
        if gap.roots:
            await self._repair.manifests(gap.roots)
            gap = await self._look()
        while gap.blocks:
            self.detail = f"fetching {len(gap.blocks)} blocks"
            before = len(gap.blocks)
            await self._repair.blocks(gap.blocks)
            gap = await self._look()
            if len(gap.blocks) >= before:
                break
        if not gap.closed and self._repair.in_checkpoint(gap):
            await self._repair.reread(self.duties())
            gap = await self._look()
        return gap

    async def _look(self) -> Gap:
        gap = await asyncio.to_thread(self._holdings.gap, self._retained(), self.duties())
        await self._server.join(gap.shards)
        self.roots = self._holdings.whole(self._retained(), gap)
        await self._count()
        return gap

    async def _count(self) -> None:
        """What was read and changed since the last look."""
        history = self._follower.history
        news = [v for v in history.roots.values() if v.at.seq > self._counted and v.root in self.roots]
        self._server.heat.name(self._holdings.names)
        for version in news:
            self._counted = max(self._counted, version.at.seq)
            if version.commit and version.commit.source is None:
                changed = await asyncio.to_thread(changed_blocks, self._store, version.commit)
                self._server.heat.update(changed, version.at.time_ns / 1e9)

    async def scrub(self, most_bytes: int) -> None:
        """Checks blocks on disk; the next round repairs what is bad."""
        await asyncio.to_thread(self._store.scrub, most_bytes)

    async def reclaim(self) -> int:
        """Deletes what no version and no open update needs any more; returns bytes freed."""
        async with self._staging.lock:
            pinned = self._staging.transactions.pinned
            roots = self._follower.history.retained(time.time_ns(), RECLAIM_S)
            return await asyncio.to_thread(self._reclaimer.run, roots, pinned)

    def _retained(self) -> tuple[Digest, ...]:
        return self._follower.history.retained(time.time_ns(), RETENTION_S)

    def _say(self, detail: str) -> None:
        if detail and detail != self._said:
            log.warning("%s", detail)
        self.detail = self._said = detail

    def _on_change(self, history: History) -> None:
        if self._forgotten != history.forgotten:  # somebody wants the room
            self._forgotten, self._reclaim_at_s = history.forgotten, 0.0
        super()._on_change(history)

    async def _act(self) -> None:
        if await self.round() and time.monotonic() >= self._reclaim_at_s:
            self._reclaim_at_s = time.monotonic() + _RECLAIM_EVERY_S
            await self.reclaim()

    async def _idle(self) -> None:
        await self.scrub(SCRUB_BYTES)
