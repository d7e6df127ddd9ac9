"""A stream that goes on only once its reader has asked for a sign of life, and has got it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from pdbus.bus import serving, streams
from pdbus.bus.headers import ALIVE, SEQUENCE
from pdbus.bus.transport import Raw
from pdbus.context import RequestContext
from pdbus.messages.router import InferReply, InferRequest


def two_replies(monkeypatch: pytest.MonkeyPatch) -> Callable[[InferRequest, RequestContext], AsyncIterator[InferReply]]:
    """Its handler. Nobody gives signs of life by himself, and readers ask soon."""
    monkeypatch.setattr(streams, "QUIET_S", 0.01)
    monkeypatch.setattr(serving, "KEEPALIVE_S", 600.0)
    given, on_frame = asyncio.Event(), streams.Replies.on_frame

    def note(replies: streams.Replies[InferReply], raw: Raw) -> None:
        on_frame(replies, raw)
        if ALIVE in raw.headers and raw.headers[SEQUENCE] == "1":  # after the first reply
            given.set()

    async def handler(message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        yield InferReply({"n": 0})
        await given.wait()
        yield InferReply({"n": 1})

    monkeypatch.setattr(streams.Replies, "on_frame", note)
    return handler
