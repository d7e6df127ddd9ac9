"""A live copy may be there before its entry is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pdbus.bus import follower as following
from pdbus.bus.codec import encode
from pdbus.bus.follower import Follower
from pdbus.bus.instruments import Instruments
from pdbus.bus.jetstream import Stored, StreamState
from pdbus.bus.transport import Raw
from pdbus.messages.changelog import LogEntry, Ref
from pdbus.subjects import CHANGELOG

ENTRY = LogEntry(ref=Ref("stable", b"\x01" * 32, "me"))


class Subscription:
    async def close(self) -> None:
        """Nothing is open."""


class Server:
    """Both the transport and JetStream, which stores an entry only once it has been asked for it so often."""

    def __init__(self, asked_in_vain: int) -> None:
        self.left = asked_in_vain
        self.asked = asyncio.Event()
        self.live_copy: Callable[[Raw], None] | None = None

    async def subscribe(self, name: str, callback: Callable[[Raw], None]) -> Subscription:
        self.live_copy = callback
        return Subscription()

    async def state(self, stream: str) -> StreamState:
        return StreamState("2026-01-01T00:00:00Z", 0, 0)

    async def next(self, stream: str, subject: str, from_seq: int) -> Stored | None:
        self.asked.set()
        if self.left:
            self.left -= 1
            return None
        return Stored(from_seq, 0, encode(ENTRY), "")


@pytest.mark.parametrize("in_vain", [0, 1, 2, 4])
async def test_it_is_looked_for_again_soon(monkeypatch: pytest.MonkeyPatch, in_vain: int) -> None:
    monkeypatch.setattr(following, "POLL_S", 1000.0)
    server: Any = Server(1 + in_vain)  # the first time, before anything was said
    to = CHANGELOG(model="m")
    async with Follower(to, CHANGELOG, 0, server, server, Instruments()) as follower:
        coming = asyncio.create_task(anext(follower))
        await asyncio.wait_for(server.asked.wait(), 60)
        await asyncio.sleep(0)
        server.live_copy(Raw(to.name, "", {}, b""))
        record = await asyncio.wait_for(coming, 60)
    assert (record.seq, record.entry) == (1, ENTRY)
