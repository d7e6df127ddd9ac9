"""One sparse table, as this server knows it: the blocks of a sealed root, and what its log says beyond them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np

from pdbus.bus.bus import Bus
from pdbus.context import Deadline
from pdbus.errors import InvalidRequest, NotFound, PdbusError, Unavailable
from pdbus.messages.common import Digest
from pdbus.messages.rows import RowsUpdate
from pdbus.param_server.store import BlockStore
from pdbus.subjects import ROWS
from pdbus.tasks import OwnTask, cancelled
from pdbus.weights.blocks import Array
from pdbus.weights.row_overlay import RowOverlay
from pdbus.weights.tables import Table, decoded_update

log = logging.getLogger(__name__)

OVERLAY_BYTES = 2 << 30
"""More than the row log itself may hold."""
_RETRY_S = 0.25


class TableFold(OwnTask):
    """Follows the table's log while entered. `refresh` brings the change log, and with it `adopt`, up to date: what was
    missed of the row log for long may be purged, and is in the blocks then."""

    def __init__(
        self,
        bus: Bus,
        model: str,
        store: BlockStore,
        root: Digest,
        table: Table,
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self.root, self.table = root, table
        self.log = ""
        """Names the row log that `seq` counts in."""
        self._bus, self._store, self._refresh = bus, store, refresh
        self._to = ROWS(model=model, table=table.name)
        self._overlay = self._new_overlay()
        self._goal: int | None = None
        """Before it is as far as that, it answers nobody; None: not known yet."""
        self._again = asyncio.Event()
        self._moved = asyncio.Event()

    @property
    def seq(self) -> int:
        return self._overlay.seq

    @property
    def pending(self) -> int:
        """Rows that wait to be sealed."""
        return len(self._overlay)

    @property
    def caught_up(self) -> bool:
        """Whether it knows all that the log held when it began."""
        return self._goal is not None and self.seq >= self._goal

    def adopt(self, root: Digest, table: Table) -> None:
        """The table's blocks are those of `root` now. Where they hold less of the log than before, or another table,
        all begins anew."""
        before, self.root, self.table = self.table, root, table
        if table.seal == before.seal:
            return
        if table.seal.origin == before.seal.origin and self._floor() >= self._overlay.floor:
            self._overlay.drop(self._floor())
            self._tell()
            return
        self._begin_anew()

    async def reached(self, seq: int, deadline: Deadline) -> bool:
        """Whether it is caught up and as far as `seq`, at the deadline at the latest."""
        try:
            async with deadline.timeout():
                while not (self.caught_up and self.seq >= seq):
                    await self._moved.wait()
        except TimeoutError:
            return False
        return True

    def begin_read(self, ids: Array) -> Reading:
        """These rows, as of now. What isn't in the log's part is read from the blocks by `Reading.finish`."""
        values = np.empty((len(ids), self.table.width), np.float32)
        lacking = self._overlay.read(ids, values)
        return Reading(self._store, self.table, ids, values, lacking)

    def _floor(self) -> int:
        """How far the blocks hold this log."""
        return self.table.seal.seq if self.table.seal.log == self.log else 0

    def _new_overlay(self) -> RowOverlay:
        return RowOverlay(self.table.rows, self.table.width, self._floor(), OVERLAY_BYTES)

    def _begin_anew(self) -> None:
        self._goal = None
        self._overlay = self._new_overlay()
        self._again.set()

    def _take(self, overlay: RowOverlay, seq: int, update: RowsUpdate | None) -> None:
        """An entry for `overlay`. Raises Overloaded where too much waits to be sealed: it comes again then."""
        if overlay is not self._overlay:  # what the new one lacks lies before this entry
            raise Unavailable(f"table {self.table.name} is read anew")
        try:
            if update is None:
                raise InvalidRequest("it can't be read")
            ids, values = decoded_update(update, self.table.rows, self.table.width)
        except InvalidRequest as error:  # for every reader alike
            log.warning("entry %d of %s is passed over: %s", seq, self._to.name, error.message)
            overlay.skip(seq)
        else:
            overlay.apply(seq, ids, values)
        self._tell()

    def _tell(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _run(self) -> None:
        while True:
            try:
                await self._follow_once()
            except PdbusError as error:
                log.warning("the rows of %s can't be followed, trying again: %s", self.table.name, error.message)
            except Exception:
                log.exception("following the rows of %s failed, trying again", self.table.name)
            await asyncio.sleep(_RETRY_S)

    async def _follow_once(self) -> None:
        await self._refresh()
        identity = await self._bus.logs.identity(self._to)
        if identity != self.log:
            if self.log:
                log.error("the row log of %s was lost: it is as it was sealed last", self.table.name)
            self.log = identity
            self._begin_anew()
        self._again.clear()
        goal = await self._bus.logs.last_seq(self._to)
        overlay = self._overlay
        async with self._bus.logs.tail(self._to, overlay.seq, partial(self._take, overlay)) as tail:
            if self._goal is None:
                self._goal = goal
                self._tell()
            lost, again = asyncio.ensure_future(tail.lost()), asyncio.ensure_future(self._again.wait())
            try:
                await asyncio.wait((lost, again), return_when=asyncio.FIRST_COMPLETED)
                if lost.done():
                    raise lost.result()
            finally:
                await cancelled(lost, again)


class Reading:
    """Rows being read, all as of one moment. `finish` may run in a thread: blocks never change."""

    def __init__(self, store: BlockStore, table: Table, ids: Array, values: Array, lacking: Array) -> None:
        self._store, self._table, self._ids = store, table, ids
        self._values, self._lacking = values, lacking

    @property
    def finished(self) -> bool:
        return not len(self._lacking)

    def finish(self) -> Array:
        """The values, [ids, width]. Raises NotFound where a block that it needs isn't here."""
        if self.finished:
            return self._values
        step, tensor, width = self._table.block_rows, self._table.tensor, self._table.width
        order = self._lacking[np.argsort(self._ids[self._lacking], kind="stable")]
        blocks, starts = np.unique(self._ids[order] // step, return_index=True)
        for block, at in zip(blocks.tolist(), np.split(order, starts[1:]), strict=True):
            content = self._store.read(tensor.blocks[block])
            if content is None:
                raise NotFound(f"block {block} of table {self._table.name} is not here")
            self._values[at] = np.frombuffer(content, "<f4").reshape(-1, width)[self._ids[at] - block * step]
        return self._values
