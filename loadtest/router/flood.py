"""A closed loop of streamed requests that costs little itself: raw HTTP on kept connections, read but not parsed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

_END = b"0\r\n\r\n"
"""The last chunk of a response (RFC 9112, 7.1)."""
_PIECE = b'"text"'
"""Each event has one choice, and each choice one of these."""
_PATIENCE_S = 60.0


@dataclass
class Flood:
    """What the streams saw. Moments on the monotonic clock."""

    streams: int
    began_s: float = 0.0
    ended_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    """Of whole answers, from the request to their last byte."""
    firsts_s: list[float] = field(default_factory=list)
    """From the request to the first token."""
    events: list[list[float]] = field(default_factory=list)
    """By answer, when each piece of it arrived; kept only where asked for."""
    errors: dict[str, int] = field(default_factory=dict)

    def fail(self, reason: str) -> None:
        self.errors[reason] = self.errors.get(reason, 0) + 1


def request(url: str, body: dict[str, Any]) -> bytes:
    payload = json.dumps(body | {"stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
        f"Cache-Control: no-store\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


class _Stream(asyncio.Protocol):
    """One connection: one request after another until `until_s`."""

    def __init__(
        self, flood: Flood, payload: bytes, until_s: float, keep_events: bool = False, pieces: int | None = None
    ) -> None:
        self._flood, self._payload, self._until_s, self._keep_events = flood, payload, until_s, keep_events
        self._wanted = pieces
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head, self._tail = b"", b""
        self._count, self._first_s = 0, 0.0
        self._moments: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self._head:
            self._head = data[:15]
            if not self._head.startswith(b"HTTP/1.1 200"):
                self._flood.fail(data[:15].decode(errors="replace") + "…")
                self._transport.close()
                return
        text = self._tail + data
        count = text.count(_PIECE)
        if count:
            self._first_s = self._first_s or now
            self._count += count
            self._moments += [now] * count if self._keep_events else []
        # Long enough for the end, and one short of a piece: what is cut in two is counted once.
        self._tail = text[1 - len(_PIECE) :]
        if text.endswith(_END):
            self._answered(now)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            if not self._tail.endswith(_END):
                self._flood.fail("a connection was lost in mid-answer")
            self.over.set_result(None)

    def _ask(self) -> None:
        self._head, self._tail = b"", b""
        self._count, self._first_s, self._moments = 0, 0.0, []
        self._sent = time.monotonic()
        self._transport.write(self._payload)

    def _answered(self, now: float) -> None:
        self._flood.latencies_s.append(now - self._sent)
        self._flood.ended_s = max(self._flood.ended_s, now)
        if self._count:
            self._flood.firsts_s.append(self._first_s - self._sent)
        if not self._count or self._count != (self._wanted or self._count):
            self._flood.fail(f"an answer in {self._count} pieces")
        if self._keep_events:
            self._flood.events.append(self._moments)
        if now < self._until_s:
            self._ask()
        else:
            self._transport.close()


async def flood(
    urls: Sequence[str],
    bodies: Sequence[dict[str, Any]],
    duration_s: float,
    *,
    keep_events: bool = False,
    pieces: int | None = None,
) -> Flood:
    """One stream a body, spread over the servers in turn; each asks for its body again and again, for `duration_s`.

    `pieces`: in how many events the text of each answer has to come; an answer in more or fewer is an error."""
    seen = Flood(len(bodies), began_s=time.monotonic())
    until_s = seen.began_s + duration_s
    loop = asyncio.get_running_loop()
    streams = []
    for number, body in enumerate(bodies):
        url = urls[number % len(urls)]
        address = urlsplit(url)
        new = partial(_Stream, seen, request(url, body), until_s, keep_events, pieces)
        _, stream = await loop.create_connection(new, address.hostname or "127.0.0.1", address.port or 80)
        streams.append(stream.over)
    _, late = await asyncio.wait(streams, timeout=duration_s + _PATIENCE_S)
    for _ in late:
        seen.fail("no end")
    return seen
