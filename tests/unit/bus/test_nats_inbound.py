"""However the socket cuts a connection's bytes, the same messages come out of them, in order."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.bus.nats_inbound import BUFFER_BYTES, Inbound, ProtocolError, Work


class Socket:
    """The transport of a connection that brings `stream` in pieces of the given sizes."""

    def __init__(self) -> None:
        self.aborted = False
        self.protocol: Any = SimpleNamespace(connection_lost=lambda exc: None)
        self.pause_reading = self.resume_reading = lambda: None

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def abort(self) -> None:
        self.aborted = True

    def bring(self, stream: bytes, pieces: random.Random) -> None:
        at = 0
        while at < len(stream):
            room = self.protocol.get_buffer(-1)
            taken = stream[at : at + pieces.choice((1, 7, 4096, len(room)))][: len(room)]
            room[: len(taken)] = taken
            self.protocol.buffer_updated(len(taken))
            at += len(taken)


def message(number: int, body: bytes, headers: bytes = b"", reply: bytes = b"") -> bytes:
    words = [b"HMSG" if headers else b"MSG", b"a.subject", b"%d" % number, *([reply] if reply else [])]
    words += [b"%d" % len(headers)] if headers else []
    return b" ".join([*words, b"%d" % (len(headers) + len(body))]) + b"\r\n" + headers + body + b"\r\n"


async def read(early: bytes, stream: bytes, seed: int) -> tuple[list[Any], Socket, Exception | None]:
    """Everything that came, commands as what was done with them; the connection is lost in the end."""
    seen: list[Any] = []
    done: list[bytes] = []

    def on_message(number: int, subject: bytes, reply: bytes, headers: bytes, body: Any) -> None:
        assert subject == b"a.subject"
        seen.append((number, reply, headers, bytes(body)))

    def on_command(line: bytes) -> Work:
        async def work() -> None:
            done.append(line)

        seen.append(line)
        return work

    socket = Socket()
    inbound = Inbound(socket, on_message, on_command, early)  # type: ignore[arg-type]
    socket.bring(stream, random.Random(seed))
    socket.protocol.connection_lost(None)
    async with asyncio.timeout(30):
        error = await inbound.until_over()
    assert done == [line for line in seen if isinstance(line, bytes)]
    return seen, socket, error


@pytest.mark.parametrize("seed", range(12))
async def test_messages_of_all_sizes_come_whole_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    sizes = (0, 1, 2, 100, 5000, BUFFER_BYTES // 4, BUFFER_BYTES // 3, BUFFER_BYTES - 1, BUFFER_BYTES, 3 * BUFFER_BYTES)
    stream, wanted = b"", []
    for number in range(30):
        if rng.random() < 0.3:
            line = rng.choice((b"PING", b"PONG", b"+OK", b'INFO {"a": 1}'))
            stream += line + b"\r\n"
            wanted.append(line)
            continue
        body = rng.randbytes(rng.choice(sizes)).replace(b"M", b"\r\n")
        headers = rng.choice((b"", b"NATS/1.0\r\nname: value\r\n\r\n"))
        reply = rng.choice((b"", b"_INBOX.x.1"))
        stream += message(number, body, headers, reply)
        wanted.append((number, reply, headers, body))
    early = rng.choice((0, 3, 50, min(len(stream), 300_000)))
    seen, socket, error = await read(stream[:early], stream[early:], seed)
    assert seen == wanted
    assert error is None
    assert not socket.aborted


@pytest.mark.parametrize(
    "line",
    [b"MSG a.subject 1\r\n", b"MSG a.subject 1 x\r\n", b"HMSG a.subject 1 9 3\r\n", b"MSG a 1 -5\r\n", b"x" * 70_000],
)
async def test_what_is_no_nats_ends_the_connection(line: bytes) -> None:
    seen, socket, error = await read(b"", line, 0)
    assert seen == []
    assert socket.aborted
    assert isinstance(error, ProtocolError | ValueError)
