"""Watching a sparse table: its updates, in order and each once, as they become durable."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pdbus.bus.bus import Bus
from pdbus.errors import Corrupt, InvalidRequest, NotFound, Overloaded, PdbusError
from pdbus.messages.rows import RowsUpdate
from pdbus.subjects import ToEvent
from pdbus.tasks import cancelled
from pdbus.weights.blocks import Array
from pdbus.weights.tables import Table, decoded_update

log = logging.getLogger(__name__)

_MOST_BYTES = 16 << 20
"""Of batches that wait to be taken; the server keeps the rest."""
_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows that one entry of the log changed, each once."""

    ids: Array
    """int64 [n]."""
    values: Array
    """fp32 [n, width]."""
    seq: int


@asynccontextmanager
async def watch(
    bus: Bus, to: ToEvent[RowsUpdate], about: Table, after: int | None, horizon: Callable[[], Awaitable[int]]
) -> AsyncIterator[AsyncIterator[RowBatch]]:
    """As `RowTable.watch`. `horizon`: up to where the log may have been purged."""
    start = await bus.logs.last_seq(to) if after is None else after
    watching = _Watching(bus, to, about, start, await bus.logs.identity(to), horizon)
    await watching.check()
    task = asyncio.create_task(watching.run())
    batches = watching.batches()
    try:
        yield batches
    finally:
        await cancelled(task)
        await batches.aclose()


class _Watching:
    def __init__(
        self,
        bus: Bus,
        to: ToEvent[RowsUpdate],
        about: Table,
        after: int,
        identity: str,
        horizon: Callable[[], Awaitable[int]],
    ) -> None:
        self._bus, self._to, self._about = bus, to, about
        self._seq, self._identity, self._horizon = after, identity, horizon
        self._queue: deque[RowBatch] = deque()
        self._bytes = 0
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._error: PdbusError | None = None

    async def batches(self) -> AsyncGenerator[RowBatch, None]:
        while True:
            while not self._queue:
                if self._error:
                    raise self._error
                self._news.clear()
                await self._news.wait()
            batch = self._queue.popleft()
            self._bytes -= batch.ids.nbytes + batch.values.nbytes
            if self._bytes <= _MOST_BYTES // 2:
                self._room.set()
            yield batch

    async def check(self) -> None:
        """Raises Corrupt, NotFound where what comes next may be missing."""
        if await self._bus.logs.identity(self._to) != self._identity:
            raise Corrupt(f"the row log of {self._about.name} was lost and begins anew")
        horizon = await self._horizon()
        if self._seq < horizon:
            raise NotFound(f"updates of {self._about.name} are there after {horizon}; older ones are in its blocks")

    async def run(self) -> None:
        """Ends with an error that the reader gets; all that may pass is tried again."""
        while self._error is None:
            try:
                await self.check()
                async with self._bus.logs.tail(self._to, self._seq, self._take) as tail:
                    why = await tail.lost()
                if not isinstance(why, Overloaded):
                    raise why
                await self._room.wait()
            except (Corrupt, NotFound) as error:
                self._error = error
                self._news.set()
            except PdbusError as error:
                log.warning("the rows of %s can't be watched, trying again: %s", self._about.name, error.message)
                await asyncio.sleep(_RETRY_S)

    def _take(self, seq: int, update: RowsUpdate | None) -> None:
        """Raises Overloaded where the reader is far behind: from there it goes on later."""
        if self._bytes > _MOST_BYTES:
            self._room.clear()
            raise Overloaded("the watcher is behind")
        self._seq = seq
        if update is None:
            return
        try:
            ids, values = decoded_update(update, self._about.rows, self._about.width)
        except InvalidRequest:  # every reader passes it over
            return
        self._queue.append(RowBatch(ids, values, seq))
        self._bytes += ids.nbytes + values.nbytes
        self._news.set()
