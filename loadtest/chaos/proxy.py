"""Stands in front of a NATS server, and cuts single processes off from it.

`python -m loadtest.chaos.proxy HOST:PORT`: prints its own port; a line `cut ID` or `mend ID` on its input does so to
the process of that id, and the input's end ends it. Whose a connection is it learns from the name that a client gives
when it connects, "decode decode-1" or "decode decode-1-bulk".

What a process that is cut off sends, or is sent, goes nowhere and comes back from nowhere: no connection breaks. What
was under way arrives late once it is mended, as after any partition.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections import defaultdict
from typing import cast

import uvloop

from loadtest.proxied import obey

_NAME = re.compile(rb'"name":\s*"\S+ (\S+?)(?:-bulk)?"')
_CONNECT_BYTES = 16 << 10


class Cuts:
    """Which ids are cut off just now, and the connections of each."""

    def __init__(self) -> None:
        self.off: set[str] = set()
        self.ways: defaultdict[str, set[Way]] = defaultdict(set)

    def command(self, line: str) -> None:
        word, id = line.split()
        (self.off.add if word == "cut" else self.off.discard)(id)
        for way in self.ways[id]:
            way.look()


class Way(asyncio.Protocol):
    """One direction of one connection: what it reads it writes into `to`."""

    def __init__(self, cuts: Cuts) -> None:
        self._cuts = cuts
        self.id = ""
        self.other: Way | None = None
        self.transport: asyncio.Transport | None = None
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own is none of asyncio's classes

    def data_received(self, data: bytes) -> None:
        if self.other and self.other.transport and not self.other.transport.is_closing():
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other:
            self.other._full = True
            self.other.look()

    def resume_writing(self) -> None:
        if self.other:
            self.other._full = False
            self.other.look()

    def connection_lost(self, error: Exception | None) -> None:
        self._cuts.ways[self.id].discard(self)
        if self.other and self.other.transport:
            self.other.transport.close()

    def belongs(self, id: str) -> None:
        self.id = id
        self._cuts.ways[id].add(self)
        self.look()

    def look(self) -> None:
        """Reads, or does not."""
        if self.transport and not self.transport.is_closing():
            if self._full or self.id in self._cuts.off:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()


class Client(Way):
    """From a client: its first lines tell whose it is."""

    def __init__(self, cuts: Cuts, host: str, port: int) -> None:
        super().__init__(cuts)
        self._address = host, port
        self._early = bytearray()
        self._dialling: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._dialling = asyncio.get_running_loop().create_task(self._dial())

    async def _dial(self) -> None:
        """The server speaks first, maybe before this goes on, and its client's name comes after that."""
        assert self.transport
        way = self.other = Way(self._cuts)
        way.other = self
        try:
            await asyncio.get_running_loop().create_connection(lambda: way, *self._address)
        except OSError:
            self.transport.close()
            return
        if self.transport.is_closing() and way.transport:
            way.transport.close()

    def data_received(self, data: bytes) -> None:
        if not self.id:
            self._early += data
            if found := _NAME.search(self._early):
                self.belongs(found[1].decode())
                if self.other:
                    self.other.belongs(self.id)
            elif len(self._early) > _CONNECT_BYTES:
                self.belongs("-")
            else:
                return
            data, self._early = bytes(self._early), bytearray()
        super().data_received(data)


async def _main(address: str) -> None:
    host, port = address.rsplit(":", 1)
    cuts, loop = Cuts(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(cuts, host, int(port)), "127.0.0.1", 0)
    await obey(server, cuts.command)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(sys.argv[1]))
