"""Reads of cache entries from a real node in a process of its own."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from loadtest.param_servers.figures import Latencies, open_loop
from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline, RequestContext
from pdbus.peers.cache import CacheRing
from pdbus.stack.nats_server import embedded_nats

_MODEL = "cached"
_READY_S = 60.0
_END_S = 15.0
_ROOT = bytes(32)


async def cache_reads(
    rate: float = 200.0, duration_s: float = 5.0, entries: int = 500, value_bytes: int = 4096
) -> Latencies:
    """Entries of the result cache, at random, in an open loop; one that isn't found counts as failed."""
    keys = [hashlib.sha256(b"entry %d" % number).digest() for number in range(entries)]
    async with (
        _node() as url,
        connect(url, name="loadtest") as bus,
        Fleet(bus) as fleet,
        CacheRing(bus, fleet, replicas=1) as ring,
    ):
        await fleet.wait_for(lambda known: _ready(known), Deadline.after(_READY_S))
        for key in keys:
            value = os.urandom(value_bytes)
            await ring.write("result", key, _ROOT, key, value, RequestContext.after(10), ttl_s=600.0)

        async def read(number: int) -> bool:
            key = keys[number * 7919 % entries]
            (value,) = await ring.get("result", [key], _ROOT, [key], RequestContext.after(10))
            return value is not None

        return await open_loop(read, rate, duration_s)


def _ready(fleet: Fleet) -> bool:
    return any(card.state == "ready" for card in fleet.live("cache"))


@asynccontextmanager
async def _node() -> AsyncIterator[str]:
    """The URL of the bus on which a cache node runs."""
    with tempfile.TemporaryDirectory(prefix="pdbus-load-", ignore_cleanup_errors=True) as folder:
        async with embedded_nats(Path(folder)) as nats:
            env = {**os.environ, "NATS_URL": nats.url, "PDBUS_ID": "cache-1", "PDBUS_MODEL": _MODEL}
            node = await asyncio.create_subprocess_exec(sys.executable, "-m", "pdbus.cache", env=env)
            try:
                yield nats.url
            finally:
                node.terminate()
                try:
                    await asyncio.wait_for(node.wait(), _END_S)
                except TimeoutError:
                    node.kill()
                    await node.wait()
