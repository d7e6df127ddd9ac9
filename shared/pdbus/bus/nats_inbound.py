"""The receiving half of the NATS protocol: out of the socket into messages, with one copy of what is large.

A message that doesn't lie whole in the common buffer gets memory of its own (nats_buffers.py), and the socket is read
straight into it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from pdbus.buffer import Buffer
from pdbus.bus.nats_buffers import Buffers

BUFFER_BYTES = 256 << 10
LONGEST_LINE = 64 << 10
"""Of a command: the server's INFO names all members of a cluster."""
LARGEST_MESSAGE = 64 << 20
"""The largest payload that a server can be set to."""
_END = 2
"""Bytes of a line's end, which stands after a payload too."""

Work: TypeAlias = Callable[[], Awaitable[None]]
OnMessage: TypeAlias = Callable[[int, bytes, bytes, bytes, Buffer], Work | None]
"""Subscription number, subject, reply subject, header block, body; what isn't there is empty."""
OnCommand: TypeAlias = Callable[[bytes], Work | None]
"""Any other line, without its end."""


class ProtocolError(Exception):
    """What came is not NATS."""


class Inbound(asyncio.BufferedProtocol):
    """Takes a connection's reading over from nats-py's stream reader, and leaves the rest to its protocol.

    `on_message` and `on_command` are called in the order of arrival, from the reader: what takes longer they give back
    as work, which `until_over` does, in order too. An error that they raise ends the connection. `early`: what has been
    read of it before."""

    def __init__(
        self, transport: asyncio.Transport, on_message: OnMessage, on_command: OnCommand, early: bytes
    ) -> None:
        self.reads = 0
        self._over = False
        self._error: Exception | None = None
        self._work: deque[Work] = deque()
        self._news = asyncio.Event()
        self._transport = transport
        self._on_message, self._on_command = on_message, on_command
        self._buffer = bytearray(max(BUFFER_BYTES, len(early) + LONGEST_LINE))
        self._view = memoryview(self._buffer)
        self._start, self._end = 0, 0
        """What is not read yet lies in between."""
        self._message: tuple[int, bytes, bytes, int] | None = None
        """Of the payload under way: subscription, subject, reply, bytes of headers."""
        self._large = Buffers()
        self._payload: memoryview | None = None
        """That payload and its line end; None: it lies in the common buffer, or there is none."""
        self._filled, self._wanted = 0, 0
        self._before = transport.get_protocol()
        transport.pause_reading()  # uvloop looks at the kind of protocol when reading begins
        transport.set_protocol(self)
        self._view[: len(early)] = early
        self.buffer_updated(len(early))
        transport.resume_reading()

    async def until_over(self) -> Exception | None:
        """Returns once the connection has ended and all that came before it was done: the error, if there was one."""
        while self._work or not self._over:
            await self._news.wait()
            self._news.clear()
            while self._work:
                await self._work.popleft()()
        return self._error

    # What the transport calls

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._payload:
            return self._payload[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self.reads += 1
        try:
            if self._payload:
                self._filled += nbytes
                if self._filled < len(self._payload):
                    return
                payload, self._payload = self._payload, None
                self._deliver(payload[:-_END])
            else:
                self._end += nbytes
            while self._step():
                pass
        except Exception as error:
            self._finish(error)
            self._transport.abort()

    def eof_received(self) -> None:
        self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(exc)
        self._before.connection_lost(exc)

    def pause_writing(self) -> None:
        self._before.pause_writing()  # nats-py's writer waits by it

    def resume_writing(self) -> None:
        self._before.resume_writing()

    # Reading

    def _step(self) -> bool:
        """Reads a command line or a payload out of the buffer; False: it has to be filled first."""
        if self._message:
            return self._take_payload()
        end = self._buffer.find(b"\r\n", self._start, self._end)
        if end < 0:
            if self._end - self._start > LONGEST_LINE:
                raise ProtocolError("a command of NATS has no end")
            return False
        line = bytes(self._view[self._start : end])
        self._start = end + _END
        if line[:4].upper() == b"MSG ":
            self._begin(line[4:].split(), headers=False)
        elif line[:5].upper() == b"HMSG ":
            self._begin(line[5:].split(), headers=True)
        elif line:
            self._leave(self._on_command(line))
        return True

    def _begin(self, words: list[bytes], *, headers: bool) -> None:
        """subject, subscription, [reply], [bytes of headers], bytes in all"""
        sizes = 2 if headers else 1
        if not 2 + sizes <= len(words) <= 3 + sizes:
            raise ProtocolError("a message of NATS has a strange head")
        reply = words[2] if len(words) == 3 + sizes else b""
        head, size = int(words[-2]) if headers else 0, int(words[-1])
        if not 0 <= head <= size <= LARGEST_MESSAGE:
            raise ProtocolError("a message of NATS has a strange size")
        self._message, self._wanted = (int(words[1]), words[0], reply, head), size + _END

    def _take_payload(self) -> bool:
        here = self._end - self._start
        if here >= self._wanted:
            start, self._start = self._start, self._start + self._wanted
            self._deliver(bytes(self._view[start : self._start - _END]))
            return True
        if self._wanted > len(self._buffer) // 4:
            self._payload = self._large.take(self._wanted)
            self._payload[:here] = self._view[self._start : self._end]
            self._filled, self._start = here, self._end
        elif self._wanted > len(self._buffer) - self._start:  # it fits once it begins at the front
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return False

    def _deliver(self, payload: Buffer) -> None:
        assert self._message
        (number, subject, reply, head), self._message = self._message, None
        headers, body = (bytes(payload[:head]), payload[head:]) if head else (b"", payload)
        self._leave(self._on_message(number, subject, reply, headers, body))

    def _leave(self, work: Work | None) -> None:
        if work:
            self._work.append(work)
            self._news.set()

    def _finish(self, error: Exception | None) -> None:
        if not self._over:
            self._over, self._error = True, error
            self._news.set()
