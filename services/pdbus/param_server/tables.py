"""Serves rows of sparse tables: those of the head of the line, as their logs have made them since."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Self

from pdbus.bus.bus import Bus
from pdbus.bus.serving import Registration
from pdbus.context import Deadline, RequestContext
from pdbus.errors import NotFound, PdbusError, TooLarge, Unavailable
from pdbus.messages.bulk import BlockHead
from pdbus.messages.common import Digest
from pdbus.messages.rows import TableRead, TableRows
from pdbus.param_server.store import BlockStore
from pdbus.param_server.table_fold import TableFold
from pdbus.peers.background import Background
from pdbus.peers.history import HistoryFollower
from pdbus.peers.rows.reader import INLINE_BYTES, LARGEST_READ_BYTES, MOST_READ_ROWS
from pdbus.subjects import TABLE_READ, transfer_to
from pdbus.tasks import cancelled
from pdbus.weights.blocks import byte_view
from pdbus.weights.history import History
from pdbus.weights.tables import LINE, Table, decoded_ids, encoded_values, tables

log = logging.getLogger(__name__)

BEHIND_S = 0.1
"""So long a read waits for the log here, before its reader may ask elsewhere."""
_LOG_S = 10.0
_RETRY_S = 0.5
_SENDING, _SENDING_BYTES = 8, 256 << 20
_SEND_S = 60.0


class Tables:
    """While entered, there is a fold for each table of the line's head."""

    def __init__(self, bus: Bus, model: str, server: str, store: BlockStore, follower: HistoryFollower) -> None:
        self._bus, self._model, self._server = bus, model, server
        self._store, self._follower = store, follower
        self._folds: dict[str, tuple[TableFold, AsyncExitStack]] = {}
        self._head: Digest | None = None
        """Whose tables the folds are."""
        self._news = asyncio.Event()
        self._looked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._registration: Registration[TableRead, TableRows] | None = None
        self._sends = Background(_SENDING, 4 * _SENDING, _SENDING_BYTES)
        self._stop_listening: Callable[[], None] = lambda: None

    @property
    def sending(self) -> int:
        return len(self._sends)

    async def __aenter__(self) -> Self:
        self._stop_listening = self._follower.on_change(self._on_change)
        self._task = asyncio.create_task(self._run())
        to = TABLE_READ(model=self._model, server=self._server)
        self._registration = await self._bus.serve(to, self._read, limit=256)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_intake()
        self._stop_listening()
        await cancelled(self._task)
        await self._sends.close()
        for name in list(self._folds):
            await self._end(name)

    async def stop_intake(self) -> None:
        if self._registration:
            await self._registration.close()
            self._registration = None

    def fold(self, table: str) -> TableFold | None:
        found = self._folds.get(table)
        return found[0] if found else None

    async def _read(self, message: TableRead, ctx: RequestContext) -> TableRows:
        fold = self.fold(message.table)
        if fold is None:
            raise NotFound(f"{self._server} knows no table {message.table}", param="table")
        row_bytes = 4 * fold.table.width
        ids = decoded_ids(message.ids, fold.table.rows)
        size = len(ids) * row_bytes
        if len(ids) > MOST_READ_ROWS or size > (LARGEST_READ_BYTES if message.stream else INLINE_BYTES):
            raise TooLarge(f"{len(ids)} rows of {row_bytes} bytes are too many for one read", param="ids")
        reached = await fold.reached(message.at_least, ctx.deadline.within(BEHIND_S))
        if not fold.caught_up:
            raise Unavailable(f"{self._server} reads the log of table {message.table} first")
        about = partial(
            TableRows, self._server, fold.root, fold.table.seal.origin, fold.log, fold.seq, fold.table.width
        )
        if not reached:
            return about(behind=True)
        reading = fold.begin_read(ids)  # with `about` in one go: both are as of the same entry
        values = reading.finish() if reading.finished else await asyncio.to_thread(reading.finish)
        if not message.stream:
            return about(values=encoded_values(values))
        subject = transfer_to(message.receiver, message.stream)
        send = partial(self._send, subject, byte_view(values), ctx.deadline.within(_SEND_S))
        if not self._sends.start(size, send):
            raise Unavailable(f"{self._server} is sending as many rows as it can")
        return about()

    async def _send(self, subject: str, content: memoryview, deadline: Deadline) -> None:
        async with self._bus.bulk.send(subject, deadline) as out:
            await out.item(BlockHead(0), content)

    def _on_change(self, history: History) -> None:
        if history.head(LINE) != self._head:
            self._news.set()

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                seen = await self._look()
            except Exception:
                log.exception("the tables of the newest version could not be looked at, trying again")
                seen = False
            if not seen:
                await asyncio.sleep(_RETRY_S)  # its manifests are on their way here
            else:
                await self._news.wait()

    async def _refresh(self) -> None:
        """Returns once the folds are those of the newest version. Raises DeadlineExceeded, Unavailable."""
        await self._follower.caught_up(Deadline.after(_LOG_S))
        try:
            async with asyncio.timeout(_LOG_S):
                while self._head != self._follower.history.head(LINE):
                    self._news.set()
                    await self._looked.wait()
        except TimeoutError:
            raise Unavailable("the newest version's manifests are not here yet") from None

    async def _look(self) -> bool:
        """Brings the folds to the tables of the line's head. False while its manifests aren't here."""
        head = self._follower.history.head(LINE)
        if head is None or head == self._head:
            return True
        manifest = await asyncio.to_thread(self._store.manifest, head)
        if manifest is None:
            return False
        try:
            found = tables(manifest)
        except PdbusError as error:
            log.error("the tables of version %s can't be served: %s", head.hex()[:12], error.message)
            found = {}
        for name in self._folds.keys() - found.keys():
            await self._end(name)
        for name, table in found.items():
            await self._adopt(head, name, table)
        self._head = head
        self._looked.set()
        self._looked = asyncio.Event()
        return True

    async def _adopt(self, head: Digest, name: str, table: Table) -> None:
        fold = self.fold(name)
        if fold and fold.table.tensor.shape == table.tensor.shape:
            fold.adopt(head, table)
            return
        await self._end(name)
        life = AsyncExitStack()
        fold = TableFold(self._bus, self._model, self._store, head, table, self._refresh)
        await life.enter_async_context(fold)
        self._folds[name] = fold, life

    async def _end(self, name: str) -> None:
        if name in self._folds:
            _, life = self._folds.pop(name)
            await life.aclose()
