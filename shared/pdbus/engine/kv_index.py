"""Tells routers which prefixes a worker has: changes of its page table as events, and all of it on request."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from pdbus.bus.bus import Bus
from pdbus.context import RequestContext
from pdbus.engine.core import Core
from pdbus.errors import PdbusError
from pdbus.messages.common import Digest
from pdbus.messages.router import INDEX_KEY_BYTES, KvIndex, KvIndexSnapshot, KvIndexWanted
from pdbus.subjects import KVINDEX, KVINDEX_SNAPSHOT
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)

_EVERY_S = 0.05
"""At most this often; the first change after a while is told at once."""
_MOST_KEYS = 4096
"""In one event."""
_MOST_SNAPSHOT = 100_000
"""In a snapshot: it has to fit into a bus message. A larger table is told of in part, which costs hits only."""


class KvIndexPublisher:
    """Publishes while entered. Holds a copy of what it has told, so that a snapshot is exactly as of its `seq`."""

    def __init__(self, bus: Bus, worker: str, core: Core) -> None:
        self._bus, self._worker, self._core = bus, worker, core
        self._changes = core.pages.changes
        self._told: dict[bytes, None] = {}
        self._seq = 0
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._changes.on_news = lambda: _wake(loop, self._news)
        self._served = await self._bus.serve(KVINDEX_SNAPSHOT(worker=self._worker), self.snapshot)
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._changes.on_news = lambda: None
        await self._served.close()
        await cancelled(self._task)

    async def snapshot(self, message: KvIndexWanted, ctx: RequestContext) -> KvIndexSnapshot:
        keys = b"".join(itertools.islice(self._told, _MOST_SNAPSHOT))
        return KvIndexSnapshot(self._bus.incarnation, self._seq, keys)

    async def _run(self) -> None:
        self._news.set()  # what changed before anybody listened
        while True:
            await self._news.wait()
            self._news.clear()
            await self._tell()
            await asyncio.sleep(_EVERY_S)

    async def _tell(self) -> None:
        changed = self._changes.take()
        if changed is None:
            keys = await self._core.call(lambda: self._core.pages.keys)
            await self._tell_all(keys)
            return
        stored = [_cut(key) for key, present in changed.items() if present and _cut(key) not in self._told]
        evicted = [_cut(key) for key, present in changed.items() if not present and _cut(key) in self._told]
        for some in _batches(evicted):
            await self._publish(evicted=some)
        for some in _batches(stored):
            await self._publish(stored=some)

    async def _tell_all(self, keys: Iterable[Digest]) -> None:
        await self._publish(clear=True)
        for some in _batches([_cut(key) for key in keys]):
            await self._publish(stored=some)

    async def _publish(
        self, stored: tuple[bytes, ...] = (), evicted: tuple[bytes, ...] = (), *, clear: bool = False
    ) -> None:
        self._seq += 1
        clear = clear or self._seq == 1  # of what a former life of this worker has told
        if clear:
            self._told.clear()
        self._told.update(dict.fromkeys(stored))
        for key in evicted:
            self._told.pop(key, None)
        message = KvIndex(self._worker, self._bus.incarnation, self._seq, stored, evicted, clear)
        try:
            await self._bus.publish(KVINDEX(worker=self._worker), message)
        except PdbusError as error:
            log.warning("changes of the page table were not told, routers will ask for them: %s", error)


def _wake(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    """From another thread."""
    loop.call_soon_threadsafe(news.set)


def _cut(key: Digest) -> bytes:
    return key[:INDEX_KEY_BYTES]


def _batches(keys: list[bytes]) -> Iterator[tuple[bytes, ...]]:
    return (tuple(keys[start : start + _MOST_KEYS]) for start in range(0, len(keys), _MOST_KEYS))
