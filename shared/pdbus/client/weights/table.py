"""A sparse table as a caller sees it: created once, updated by rows, looked up, watched, sealed now and then."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.client.weights.arrays import as_fp32
from pdbus.client.weights.row_watch import RowBatch, watch
from pdbus.client.weights.row_writer import Accepted, RowWriter
from pdbus.client.weights.table_create import Init, create, drop
from pdbus.client.weights.table_seal import purge_horizon, seal
from pdbus.client.weights.terms import Committed
from pdbus.client.weights.update import Update
from pdbus.context import Deadline, RequestContext
from pdbus.errors import InvalidRequest, NotFound, PdbusError
from pdbus.messages.common import Digest
from pdbus.peers.history import HistoryFollower
from pdbus.peers.rows import RowFollower, RowReader, Rows
from pdbus.peers.weights import BlockReader
from pdbus.subjects import ROWS
from pdbus.weights.blocks import Array
from pdbus.weights.tables import LINE, Table, layer_name

log = logging.getLogger(__name__)

_ANSWER_S = 30.0
_FLUSH_S = 60.0
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Home:
    """What a table has of the model's weights that it belongs to."""

    bus: Bus
    model: str
    follower: HistoryFollower
    fleet: Fleet
    reader: BlockReader
    ready: Callable[[], Awaitable[None]]
    begin: Callable[..., AbstractAsyncContextManager[Update]]


class RowTable:
    """Made by `Weights.table`, which ends it. It reads what it wrote: a lookup is at least as of the last update that
    was durable before it, and of the last lookup."""

    def __init__(self, home: Home, name: str) -> None:
        layer_name(name)
        self.name = name
        self.seq = 0
        """Of the log: what the next lookup is at least as of."""
        self._home = home
        self._to = ROWS(model=home.model, table=name)
        self._rows = RowReader(home.bus, home.model, home.follower, home.fleet, home.reader)
        self._head: Digest | None = None
        self._about: Table | None = None
        self._writer: RowWriter | None = None
        self._zeros = np.zeros(0, np.float32)

    async def create(self, rows: int, width: int, *, init: Init = None, message: str = "") -> Committed:
        """Makes the table, fp32 [rows, width], as a version on the line `stable`.

        `init`: None for zeros, of which none travel; an array; or a function of (first row, count) that gives
        [count, width], called for some thousand rows at a time. Raises Conflict where it exists, InvalidRequest."""
        home = self._home
        await home.ready()
        await home.follower.caught_up(Deadline.after(_ANSWER_S))
        done = await create(home.bus, home.begin, self._to, self.name, (rows, width), init, message)
        await home.follower.caught_up(Deadline.after(_ANSWER_S))
        return done

    async def exists(self) -> bool:
        """Whether there is such a table in the newest version."""
        try:
            await self._table()
        except NotFound:
            return False
        return True

    @property
    def messages(self) -> int:
        """Entries of the log that this process's updates have become so far."""
        return self._writer.messages if self._writer else 0

    async def update(self, ids: Any, values: Any) -> Accepted:
        """New values of rows: one id and [width], or ids [n] (of one that comes twice the last counts) and [n, width].

        Returns once they are accepted, which waits while too many are on their way; awaiting the result, or `flush`,
        waits until they are durable. Raises InvalidRequest, NotFound where there is no such table."""
        writer, about = await self._open_writer()
        if type(ids) is int and type(values) is np.ndarray and self._is_row(values) and 0 <= ids < about.rows:
            accepted = writer.add_one(ids, values)  # the same in half the time
            if accepted:
                return accepted
        rows = np.atleast_1d(np.asarray(ids))
        new = as_fp32("values", values)
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise InvalidRequest("ids are integers", param="ids")
        if new.size != len(rows) * about.width or new.shape[-1:] != (about.width,):
            raise InvalidRequest(f"{len(rows)} rows have shape {(len(rows), about.width)}", param="values")
        _check_range(rows, about)
        return await writer.add(rows, new.reshape(len(rows), about.width))

    async def flush(self, timeout_s: float = _FLUSH_S) -> int:
        """Waits until all updates so far are durable; returns the newest one's sequence in the log.

        Raises DeadlineExceeded, and what an update failed with since the last flush."""
        if self._writer:
            self.seq = max(self.seq, await self._writer.flush(Deadline.after(timeout_s)))
        return self.seq

    async def lookup(self, ids: Any, *, at_least: int = 0, timeout_s: float = _ANSWER_S) -> Rows:
        """Rows by id, repeats allowed, in that order; `at_least`: as of this sequence of the log or later.

        Raises InvalidRequest, NotFound, DeadlineExceeded."""
        about = await self._table()
        rows = np.asarray(ids)
        if rows.ndim != 1 or (rows.dtype.kind not in "iu" and len(rows)):
            raise InvalidRequest("ids are a list of integers", param="ids")
        _check_range(rows, about)
        since = max(at_least, self.seq, self._writer.seq if self._writer else 0)
        found = await self._rows.read(about, rows.astype(np.int64), since, RequestContext.after(timeout_s))
        self.seq = max(self.seq, found.seq)
        return found

    @asynccontextmanager
    async def watch(self, *, after: int | None = None) -> AsyncIterator[AsyncIterator[RowBatch]]:
        """The updates as they become durable: those after a sequence of the log; None: from now on. In order, each
        once; while they aren't taken the server keeps them.

        Raises NotFound where updates after `after` are sealed and purged, Corrupt where the log was lost."""
        about = await self._table()
        async with watch(self._home.bus, self._to, about, after, self._horizon) as batches:
            yield batches

    @asynccontextmanager
    async def follower(self, most_bytes: int = 64 << 20) -> AsyncIterator[RowFollower]:
        """Lookups from memory, for whoever looks rows up often: see RowFollower."""
        await self._table()
        home = self._home
        async with RowFollower(home.bus, home.model, self.name, home.follower, self._rows, most_bytes) as follower:
            yield follower

    async def seal(self, *, message: str = "", timeout_s: float = 600.0) -> Digest:
        """Moves what is durable in the log now into blocks, by a commit on the line `stable`; no row changes. Returns
        the root that holds it: of several seals at once one commits, the others find it done.

        Entries that no version needs any more are then removed from the log. Raises DeadlineExceeded, NotFound."""
        await self.flush(timeout_s)
        await self._table()
        home = self._home
        root = await seal(home.bus, home.begin, home.reader, home.follower, self._to, self.name, message, timeout_s)
        try:
            await home.bus.logs.purge(self._to, upto=await self._horizon())
        except PdbusError as error:  # the next seal does it
            log.warning("the row log of %s was not purged: %s", self.name, error.message)
        return root

    async def drop(self, *, message: str = "") -> Committed | None:
        """A version without the table, on the line `stable`; those before it keep theirs, for a rollback.

        Its log's entries stay while one of these is kept: called again after that, it removes them, and gives None.
        Raises NotFound where there is neither, Conflict where the line moved meanwhile."""
        home = self._home
        there, last = await self.exists(), await home.bus.logs.last_seq(self._to)
        if not there and not last:
            raise NotFound(f"there is no table {self.name}")
        done = await drop(home.begin, self.name, message) if there else None
        await home.follower.caught_up(Deadline.after(_ANSWER_S))
        log = await home.bus.logs.identity(self._to)
        horizon = await purge_horizon(home.follower, home.reader, self.name, log, last)
        await home.bus.logs.purge(self._to, upto=horizon)
        return done

    async def close(self) -> None:
        """What can't be made durable within some seconds is given up; `flush` before, to know."""
        if self._writer:
            await self._writer.close(Deadline.after(_CLOSE_S))

    def _is_row(self, values: Array) -> bool:
        """Whether it is a row of finite numbers as it stands: nothing else times zero is zero."""
        same = values.dtype == self._zeros.dtype and values.shape == self._zeros.shape
        return same and bool(values.dot(self._zeros) == 0.0)

    async def _horizon(self) -> int:
        home = self._home
        log = await home.bus.logs.identity(self._to)
        return await purge_horizon(home.follower, home.reader, self.name, log)

    async def _table(self) -> Table:
        if self._about is None or self._home.follower.history.head(LINE) != self._head:
            ctx, before = RequestContext.after(_ANSWER_S), self._about
            await self._home.ready()
            try:
                self._head, self._about = await self._rows.table(self.name, ctx)
            except NotFound:  # it may have been created a moment ago
                await self._home.follower.caught_up(ctx.deadline)
                self._head, self._about = await self._rows.table(self.name, ctx)
            if before and before.seal.origin != self._about.seal.origin:  # dropped, and made anew
                self.seq, writer, self._writer = 0, self._writer, None
                if writer:
                    await writer.close(Deadline.after(_CLOSE_S))
        return self._about

    async def _open_writer(self) -> tuple[RowWriter, Table]:
        about = await self._table()
        if self._writer is None:
            self._zeros = np.zeros(about.width, np.float32)
            self._writer = RowWriter(self._home.bus, self._to, about.width, about.update_rows)
        return self._writer, about


def _check_range(ids: Array, about: Table) -> None:
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < about.rows):
        raise InvalidRequest(f"the rows of {about.name} are 0 to {about.rows - 1}", param="ids")
