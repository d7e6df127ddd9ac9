"""A network cable between a process and a server, to be pulled and plugged in again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pdbus.tasks import cancelled

_CHUNK = 1 << 16


class Cable:
    """While it is pulled nothing passes, in either direction, and neither end is told."""

    def __init__(self, host: str, port: int) -> None:
        self._server_at = (host, port)
        self._plugged = asyncio.Event()
        self._plugged.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def pull(self) -> None:
        self._plugged.clear()

    def plug_in(self) -> None:
        self._plugged.set()

    async def close(self) -> None:
        await cancelled(*self._tasks)

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there, back = await asyncio.open_connection(*self._server_at)
            for source, sink in ((reader, back), (there, writer)):
                task = asyncio.create_task(self._pump(source, sink))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while data := await source.read(_CHUNK):
                    await self._plugged.wait()
                    sink.write(data)
                    await sink.drain()
        finally:
            sink.close()


@asynccontextmanager
async def cable(host: str, port: int) -> AsyncIterator[Cable]:
    made = Cable(host, port)
    server = await asyncio.start_server(made.take, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await made.close()
