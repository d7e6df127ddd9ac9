"""Values that are too large for a message: sent to readers and taken from writers as bulk streams, a few at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from pdbus.bus.bus import Bus
from pdbus.cache.pieces import Value, pieces, runs
from pdbus.caching.disk_entry import DiskEntry
from pdbus.caching.entry import Entry
from pdbus.context import Deadline
from pdbus.errors import Corrupt, Unavailable
from pdbus.messages.bulk import CacheHead
from pdbus.peers.background import Background
from pdbus.subjects import transfer_to
from pdbus.tasks import cancelled

_AT_ONCE = 4
_WAITING = 32
_RUN_BYTES = 4 << 20
"""Of values that are cut across: enough for full frames, and little to lose if the reading ends early."""
_BEGINS_S = 5.0
"""A value of which nothing has come by then doesn't come."""


@dataclass(frozen=True, slots=True)
class Item:
    """A value to be sent: the `index` that the reader knows it by, its size, and where it is until its turn comes."""

    index: int
    size: int
    load_bytes: int
    """What it takes of memory until it is sent; 0 where it is there as it will be sent."""
    entry: Entry | DiskEntry


Load: TypeAlias = Callable[[Sequence[Entry | DiskEntry]], Awaitable[list[Value | None]]]
"""Brings the values of a run. None: it is not there any more, and left out."""


class Transfers:
    """`limit_bytes`: of unpacked values on their way, in each direction."""

    def __init__(self, bus: Bus, limit_bytes: int) -> None:
        self._bus = bus
        self._run_bytes = min(_RUN_BYTES, limit_bytes // 4)
        self._sends = Background(_AT_ONCE, _WAITING, limit_bytes)
        self._takes = Background(_AT_ONCE, _WAITING, limit_bytes)

    def __len__(self) -> int:
        return len(self._sends) + len(self._takes)

    def send(
        self, address: str, stream: str, items: Sequence[Item], load: Load, parts: int, deadline: Deadline
    ) -> bool:
        """Begins to send values to a reader's stream; `parts` as in CacheGet. False: too much is on its way already."""
        known = [(item.index, item.size, item.load_bytes) for item in items]
        cut = [items[run] for run in runs(known, parts, self._run_bytes)]
        loaded = max(sum(item.load_bytes for item in run) for run in cut)
        size = max(min(len(cut), 2) * loaded, max(item.size for item in items))  # one is loaded while another is sent
        return self._sends.start(size, partial(self._send, address, stream, cut, load, parts, deadline))

    async def take(self, size: int, keep: Callable[[bytes], Awaitable[None]], deadline: Deadline) -> str:
        """Opens a stream for one value of `size` bytes, to be given to `keep`. Returns its id, or "" if too much is on
        its way already."""
        opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if not self._takes.start(size, partial(self._take, opened, size, keep, deadline)):
            return ""
        return await opened

    async def drain(self, deadline: Deadline) -> None:
        await self._sends.drain(deadline)
        await self._takes.drain(deadline)

    async def close(self) -> None:
        await self._sends.close()
        await self._takes.close()

    async def _send(
        self, address: str, stream: str, cut: Sequence[Sequence[Item]], load: Load, parts: int, deadline: Deadline
    ) -> None:
        """Loads each run while the one before it is sent. Of a prefix nothing is sent after what is not there."""

        async def loaded(run: Sequence[Item]) -> list[Value | None]:
            return await load([item.entry for item in run])

        loading = asyncio.create_task(loaded(cut[0]))
        try:
            async with self._bus.bulk.send(transfer_to(address, stream), deadline) as out:
                for number, run in enumerate(cut):
                    there = await loading
                    if number + 1 < len(cut):
                        loading = asyncio.create_task(loaded(cut[number + 1]))
                    values = [value for value in there if value is not None]
                    if len(values) == len(run):
                        for head, body in pieces(run[0].index, values, parts):
                            await out.item(head, body)
                    elif parts:
                        return
        finally:
            await cancelled(loading)

    async def _take(
        self,
        opened: asyncio.Future[str],
        size: int,
        keep: Callable[[bytes], Awaitable[None]],
        deadline: Deadline,
    ) -> None:
        try:
            async with self._bus.bulk.receive() as incoming:
                if opened.done():  # its writer gave up waiting
                    return
                incoming.begins_by(Deadline.after(_BEGINS_S))
                opened.set_result(incoming.stream)
                async for _, body in incoming.items(CacheHead, deadline):
                    if len(body) != size:
                        raise Corrupt(f"a value of {len(body)} bytes where {size} were announced")
                    await keep(bytes(body))
        finally:
            if not opened.done():
                opened.set_exception(Unavailable("the cache node could not open a stream"))
