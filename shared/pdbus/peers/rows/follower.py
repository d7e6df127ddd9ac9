"""A table's rows in a process that looks them up often: those that it uses, kept as new as the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np

from pdbus.bus.bus import Bus
from pdbus.context import RequestContext
from pdbus.errors import Corrupt, InvalidRequest, PdbusError
from pdbus.messages.rows import RowsUpdate
from pdbus.peers.history import HistoryFollower
from pdbus.peers.rows.reader import RowReader, Rows
from pdbus.subjects import ROWS
from pdbus.tasks import cancelled
from pdbus.weights.blocks import Array
from pdbus.weights.history import History
from pdbus.weights.row_cache import RowCache
from pdbus.weights.tables import LINE, Table, decoded_update

log = logging.getLogger(__name__)

_OPEN_S = 10.0
_RETRY_S = 0.25


class RowFollower:
    """While entered it follows the log of one table, and keeps up to `most_bytes` of rows that were looked up.

    Whenever the log may have been missed in part, what is kept is given up: that costs reads and never correctness."""

    def __init__(
        self, bus: Bus, model: str, table: str, history: HistoryFollower, reader: RowReader, most_bytes: int
    ) -> None:
        self.name = table
        self.hits = self.misses = 0
        """Rows, since the start."""
        self._bus, self._history, self._reader = bus, history, reader
        self._to = ROWS(model=model, table=table)
        self._most_bytes = most_bytes
        self._head = b""
        self._table: Table | None = None
        self._cache = RowCache(1, 1)
        self._log = ""
        """Of the log that the cache follows; empty while it follows none, and counts for nothing."""
        self._again = asyncio.Event()
        self._begun = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stop_listening: Callable[[], None] = lambda: None

    async def __aenter__(self) -> Self:
        """Returns once it follows the log; where that takes long, it asks servers until then."""
        self._stop_listening = self._history.on_change(self._on_change)
        self._task = asyncio.create_task(self._run())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OPEN_S):
                    await self._begun.wait()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_listening()
        await cancelled(self._task)

    @property
    def seq(self) -> int:
        """How far it has followed the log; 0 while it doesn't."""
        return self._cache.seq if self._log else 0

    async def lookup(self, ids: Array, ctx: RequestContext, *, at_least: int = 0) -> Rows:
        """Rows by id (int64, repeats allowed), at least as of `at_least`, and of all that came here before the call.

        Raises NotFound where there is no such table, InvalidRequest, DeadlineExceeded."""
        if not self._log or self._table is None:
            _, about = await self._reader.table(self.name, ctx)
            _check(ids, about)
            return await self._reader.read(about, ids, at_least, ctx)
        about, log_name, cache = self._table, self._log, self._cache
        _check(ids, about)
        since = max(at_least, cache.seq)
        values = np.empty((len(ids), about.width), np.float32)
        lacking = cache.read(ids, values) if at_least <= cache.seq else np.arange(len(ids))
        self.hits += len(ids) - len(lacking)
        self.misses += len(lacking)
        if not len(lacking):
            return Rows(values, since, log_name)
        wanted, back = np.unique(ids[lacking], return_inverse=True)
        cache.reserve(wanted)
        found = await self._reader.read(about, wanted, since, ctx)
        if found.log != log_name:
            raise Corrupt(f"the row log of {self.name} was lost meanwhile")
        if cache is self._cache and self._log:  # else it has begun anew
            cache.fill(found.seq, wanted, found.values)
        values[lacking] = found.values[back]
        return Rows(values, since, log_name)

    def _take(self, seq: int, update: RowsUpdate | None) -> None:
        table = self._table
        if table is None or update is None:
            self._cache.skip(seq)
            return
        try:
            self._cache.apply(seq, *decoded_update(update, table.rows, table.width))
        except InvalidRequest:  # every reader passes it over
            self._cache.skip(seq)

    def _on_change(self, history: History) -> None:
        if history.head(LINE) != self._head:
            self._again.set()

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except PdbusError as error:
                log.warning("rows of %s are not kept for now: %s", self.name, error.message)
            except Exception:
                log.exception("following the rows of %s failed, trying again", self.name)
            finally:
                self._log = ""
            await asyncio.sleep(_RETRY_S)

    async def _follow(self) -> None:
        self._head, self._table = await self._reader.table(self.name, RequestContext.after(_OPEN_S))
        name = await self._bus.logs.identity(self._to)
        last = await self._bus.logs.last_seq(self._to)
        self._cache = RowCache(self._table.width, self._most_bytes, last)
        async with self._bus.logs.tail(self._to, last, self._take) as tail:
            self._log = name
            self._begun.set()
            lost = asyncio.ensure_future(tail.lost())
            try:
                while not lost.done():
                    self._again.clear()
                    await self._check_same_table()
                    again = asyncio.ensure_future(self._again.wait())
                    try:
                        await asyncio.wait((lost, again), return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        await cancelled(again)
                raise lost.result()
            finally:
                await cancelled(lost)

    async def _check_same_table(self) -> None:
        """Other versions of a table have the same rows, unless it was created anew. Raises Corrupt then."""
        if self._history.history.head(LINE) == self._head or self._table is None:
            return
        head, table = await self._reader.table(self.name, RequestContext.after(_OPEN_S))
        if table.seal.origin != self._table.seal.origin:
            raise Corrupt("it is another table now")
        self._head, self._table = head, table


def _check(ids: Array, about: Table) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= about.rows):
        raise InvalidRequest(f"the rows of {about.name} are 0 to {about.rows - 1}", param="ids")
