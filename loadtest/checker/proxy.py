"""Stands in front of a NATS server, and loses, doubles, delays and reorders what that sends to its clients.

`python -m loadtest.checker.proxy HOST:PORT SEED`: prints its own port; a line `on` on its input begins the faults,
`off` ends them, and the input's end ends it. It prints what it did as JSON then.

Messages are hit, never the protocol around them: pings, and with them what the clients take for a barrier, stay whole.
What hits a message is drawn from the seed, the connection's number and the message's: so far as a run of real
processes can be repeated, it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import uvloop

from loadtest.proxied import obey

_READ_BYTES = 256 << 10
_LONGEST_DELAY_S = 0.2


@dataclass(frozen=True)
class Rates:
    """Chances of a message."""

    lose: float
    double: float
    delay: float


CLASSES: tuple[tuple[str, re.Pattern[str], Rates], ...] = (
    ("bulk", re.compile(r"pd\.v1\.(kv|bulk)\."), Rates(0.001, 0.001, 0.002)),
    ("log", re.compile(r"pd\.v1\.(changelog|invalidated|rows)"), Rates(0.2, 0.1, 0.2)),
    ("event", re.compile(r"pd\.v1\.(presence|tokens|kvindex|cancel|credit)\b"), Rates(0.02, 0.02, 0.04)),
    ("request", re.compile(r"pd\.v1\."), Rates(0.002, 0.004, 0.02)),
    ("reply", re.compile(r"_INBOX"), Rates(0.002, 0.01, 0.02)),
)
"""By subject, the first that fits. A copy of a log's entry that comes live only wakes its followers."""


@dataclass
class Faults:
    """Draws what happens to each message."""

    seed: int
    on: bool = False
    done: Counter[str] = field(default_factory=Counter)

    def command(self, line: str) -> None:
        self.on = line.strip() == "on"

    def draw(self, subject: str, rng: random.Random) -> tuple[float, ...]:
        """In how many seconds the message is passed on, for each copy; () loses it."""
        kind, rates = next(((kind, rates) for kind, fits, rates in CLASSES if fits.match(subject)), ("", None))
        drawn = rng.random()
        if not self.on or rates is None:
            return (0.0,)
        for what, chance, delays in (
            ("lost", rates.lose, ()),
            ("doubled", rates.double, (0.0, rng.uniform(0, _LONGEST_DELAY_S))),
            ("delayed", rates.delay, (rng.uniform(0, _LONGEST_DELAY_S),)),
        ):
            if drawn < chance:
                self.done[f"{kind} {what}"] += 1
                return delays
            drawn -= chance
        return (0.0,)


class Parser:
    """Cuts what a server sends into messages, each with its subject, and the lines between them (subject "")."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        self._rest += data
        at = 0
        while (end := self._rest.find(b"\r\n", at)) >= 0:
            end += 2
            words = bytes(self._rest[at:end]).split()
            subject = ""
            if words and words[0].upper() in (b"MSG", b"HMSG"):
                subject = words[1].decode()
                end += int(words[-1]) + 2
                if end > len(self._rest):
                    break
            yield subject, bytes(self._rest[at:end])
            at = end
        del self._rest[:at]


async def serve(host: str, port: int, faults: Faults) -> asyncio.Server:
    """Listens at a free port; every connection gets one of its own to the server."""
    numbers = itertools.count()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rng = random.Random(f"{faults.seed} {next(numbers)}")
        try:
            to_server = await asyncio.open_connection(host, port, limit=_READ_BYTES)
        except OSError:
            writer.close()
            return
        ways = [
            asyncio.ensure_future(_copy(reader, to_server[1])),
            asyncio.ensure_future(_pass_on(to_server[0], writer, faults, rng)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, to_server[1]):
                end.close()

    return await asyncio.start_server(connected, "127.0.0.1", 0, limit=_READ_BYTES)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_READ_BYTES):
        writer.write(data)
        await writer.drain()


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults, rng: random.Random
) -> None:
    loop, parser = asyncio.get_running_loop(), Parser()

    def late(whole: bytes) -> None:
        if not writer.is_closing():
            writer.write(whole)

    while data := await reader.read(_READ_BYTES):
        for subject, whole in parser.feed(data):
            for delay_s in faults.draw(subject, rng) if subject else (0.0,):
                if delay_s:
                    loop.call_later(delay_s, late, whole)
                else:
                    writer.write(whole)
        await writer.drain()


async def _main(address: str, seed: int) -> None:
    host, port = address.rsplit(":", 1)
    faults = Faults(seed)
    server = await serve(host, int(port), faults)
    await obey(server, faults.command)
    print(json.dumps(faults.done), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(sys.argv[1], int(sys.argv[2])))
