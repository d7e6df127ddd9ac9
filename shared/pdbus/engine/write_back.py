"""Writes pages of the pool to the cache nodes, behind the requests: each once, bounded, and hot ones first.

Those of a snapshot can't wait for a calm moment, since what they are for is a worker that dies while it is busy; they
take a small part of the time, whatever the engine does."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from pdbus.context import RequestContext
from pdbus.engine.core import Core
from pdbus.kv.codec import export_page
from pdbus.kv.page_hold import PageHold
from pdbus.kv.prefix import PageKey
from pdbus.messages.common import Digest
from pdbus.peers.cache import CacheRing
from pdbus.tasks import OwnTask

TTL_S = 3600.0
_MOST_WAITING = 4096
"""Pages that wait to be written, of either kind; more are not kept."""
_REMEMBERED = 16_384
_EXPORTED = 4
"""Hot pages copied out of the pool at a time, or those of a snapshot. Only for the copying are they held."""
_CALM_S = 0.05
"""So long after it has computed something the engine is not taken for idle: the next prompt is often on its way."""
_HOT_REST, _COLD_REST, _SNAPSHOT_REST = 1.0, 3.0, 2.0
"""Times what a write took: others of this machine have something to do, also while this engine has nothing."""


@dataclass(frozen=True, slots=True)
class _Page:
    key: PageKey
    root: Digest
    ctx: RequestContext


class WriteBack(OwnTask):
    """Writes while entered. It holds no page while it waits: one that is reclaimed meanwhile is not written."""

    def __init__(self, ring: CacheRing, core: Core) -> None:
        self._ring, self._core = ring, core
        self._hot: deque[_Page] = deque()
        self._snapshots: deque[_Page] = deque()
        self._cold: OrderedDict[Digest, _Page] = OrderedDict()
        self._known: OrderedDict[Digest, None] = OrderedDict()
        """Keys that wait, or were read or written lately: they are not written again."""
        self._news = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Pages to be written yet."""
        return len(self._hot) + len(self._snapshots) + len(self._cold)

    def put(self, keys: Iterable[PageKey], root: Digest, ctx: RequestContext, *, hot: bool) -> None:
        """Pages that are published in the pool. `hot`: worth a part of the time in which something is computed."""
        for key in keys:
            if key.digest not in self._known and len(self._hot if hot else self._cold) < _MOST_WAITING:
                self.remember([key])
                page = _Page(key, root, ctx)
                if hot:
                    self._hot.append(page)
                else:
                    self._cold[key.digest] = page
        self._look()

    def snapshot(self, keys: Iterable[PageKey], root: Digest, ctx: RequestContext) -> None:
        """Likewise, to be written soon: also those that wait for a calm moment already."""
        for key in keys:
            if len(self._snapshots) >= _MOST_WAITING:
                break
            waiting = self._cold.pop(key.digest, None)
            if waiting or key.digest not in self._known:
                self.remember([key])
                self._snapshots.append(waiting or _Page(key, root, ctx))
        self._look()

    def _look(self) -> None:
        if self._hot or self._snapshots or self._cold:
            self._news.set()

    def remember(self, keys: Iterable[PageKey]) -> None:
        """The nodes have these."""
        for key in keys:
            self._known[key.digest] = None
            self._known.move_to_end(key.digest)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)

    def forget(self, keys: Iterable[PageKey]) -> None:
        """The nodes don't have these, whatever was thought."""
        for key in keys:
            self._known.pop(key.digest, None)

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            calm = False
            while self._hot or self._snapshots or self._cold:
                if self._hot:
                    await self._write(_some(self._hot), _HOT_REST)
                elif self._snapshots:
                    await self._write(_some(self._snapshots), _SNAPSHOT_REST)
                elif calm and not self._core.busy:
                    await self._write([self._cold.popitem(last=False)[1]], _COLD_REST)
                else:
                    await asyncio.sleep(_CALM_S)
                    calm = not self._core.busy

    async def _write(self, pages: list[_Page], rest: float) -> None:
        """Rests `rest` times as long as it took, but for what was waited for a step of the engine to end: a slow engine
        would else have its pages written later than they are needed."""
        holds = await self._held(pages)
        started_s = time.monotonic()
        values = await self._exported(holds)
        await asyncio.gather(*map(self._store, pages, values))
        await asyncio.sleep(rest * (time.monotonic() - started_s))

    async def _store(self, page: _Page, value: memoryview | None) -> None:
        stored = value is not None and await self._ring.write(
            "kv", page.key.digest, page.root, material(page.key), value, page.ctx, ttl_s=TTL_S
        )
        if not stored:
            self.forget([page.key])

    async def _held(self, pages: list[_Page]) -> list[PageHold]:
        """Each with its page, or with none where that is gone. To be released."""
        holds = [self._core.pages.hold() for _ in pages]

        def match() -> None:
            for hold, page in zip(holds, pages, strict=True):
                hold.match([page.key])

        try:
            await self._core.call(match)
        except BaseException:
            self._release(holds)
            raise
        return holds

    async def _exported(self, holds: list[PageHold]) -> list[memoryview | None]:
        try:
            values: list[memoryview | None] = []
            for hold in holds:
                values.append(export_page(self._core.pool, hold.pages[0]) if hold.pages else None)
                await asyncio.sleep(0)  # a page takes a while to copy: tokens go first
            return values
        finally:
            self._release(holds)

    def _release(self, holds: list[PageHold]) -> None:
        for hold in holds:
            self._core.post(hold.release)


def _some(pages: deque[_Page]) -> list[_Page]:
    return [pages.popleft() for _ in range(min(_EXPORTED, len(pages)))]


def material(key: PageKey) -> bytes:
    """What a hit is compared with: the page's tokens."""
    return struct.pack(f">{len(key.tokens)}I", *key.tokens)
