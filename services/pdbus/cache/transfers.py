"""Values that are too large for a message: sent to readers and taken from writers as bulk streams, a few at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from pdbus.bus.bus import Bus
from pdbus.caching.compression import unpack
from pdbus.caching.entry import Entry
from pdbus.context import Deadline
from pdbus.errors import Corrupt, Unavailable
from pdbus.messages.bulk import CacheHead
from pdbus.peers.background import Background
from pdbus.subjects import TRANSFER

_AT_ONCE = 4
_WAITING = 32


class Transfers:
    """`limit_bytes`: of unpacked values on their way, in each direction."""

    def __init__(self, bus: Bus, limit_bytes: int) -> None:
        self._bus = bus
        self._sends = Background(_AT_ONCE, _WAITING, limit_bytes)
        self._takes = Background(_AT_ONCE, _WAITING, limit_bytes)

    def __len__(self) -> int:
        return len(self._sends) + len(self._takes)

    def send(self, address: str, stream: str, values: list[tuple[int, Entry]], deadline: Deadline) -> bool:
        """Begins to send (index, entry) pairs to a reader's stream. False: too much is on its way already."""
        # One value is unpacked at a time; the packed ones are the store's own.
        size = max(entry.size for _, entry in values)
        return self._sends.start(size, partial(self._send, address, stream, values, deadline))

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

    async def _send(self, address: str, stream: str, values: list[tuple[int, Entry]], deadline: Deadline) -> None:
        async with self._bus.bulk.send(TRANSFER.name(address=address, stream=stream), deadline) as out:
            for index, entry in values:
                value = await asyncio.to_thread(unpack, entry.value, entry.size) if entry.packed else entry.value
                await out.item(CacheHead(index), value)

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
                opened.set_result(incoming.stream)
                async for _, body in incoming.items(CacheHead, deadline):
                    if len(body) != size:
                        raise Corrupt(f"a value of {len(body)} bytes where {size} were announced")
                    await keep(bytes(body))
        finally:
            if not opened.done():
                opened.set_exception(Unavailable("the cache node could not open a stream"))
