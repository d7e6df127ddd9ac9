"""Counts what crosses the bus as KV, by listening to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import nats
from nats.aio.msg import Msg

from pdbus.subjects import ANY, KV


@dataclass
class Traffic:
    payload_bytes: int = 0
    frames: int = 0


@asynccontextmanager
async def kv_traffic(nats_url: str) -> AsyncIterator[Traffic]:
    """Counts while the scope is open. Each frame is delivered twice then: never time anything in it."""
    seen = Traffic()

    async def count(message: Msg) -> None:
        seen.payload_bytes += len(message.data)
        seen.frames += 1

    client = await nats.connect(nats_url, pending_size=1 << 20)
    try:
        await client.subscribe(
            KV.name(worker=ANY, session=ANY, attempt=ANY), cb=count, pending_bytes_limit=-1, pending_msgs_limit=-1
        )
        await client.flush()
        yield seen
        await client.flush()
    finally:
        await client.close()
