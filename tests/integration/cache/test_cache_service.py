"""A cache node against a real server: in step with the log, over restarts, within its memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path

import pytest

from pdbus.bus.bus import Bus, connect
from pdbus.bus.presence import Fleet
from pdbus.cache.service import CacheService
from pdbus.cache.settings import CacheSettings
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict
from pdbus.messages.cache import CacheGet, CachePut, CacheScan
from pdbus.messages.workers import Invalidated
from pdbus.peers.cache import CacheRing
from pdbus.peers.cache_node import CacheNode
from pdbus.subjects import CACHE_SCAN, INVALIDATED
from tests.support.living import living
from tests.support.until import until


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with connect(nats_url, name="test") as bus:
        yield bus


@pytest.fixture
async def fleet(bus: Bus) -> AsyncIterator[Fleet]:
    async with Fleet(bus) as fleet:
        yield fleet


@contextlib.asynccontextmanager
async def node(nats_url: str, fleet: Fleet, name: str, model: str) -> AsyncIterator[CacheService]:
    """A node in this process, ready."""
    settings = CacheSettings(nats_url=nats_url, id=name, model=model, cache_bytes=16 << 20)
    async with connect(nats_url, name=name) as bus, living(CacheService(settings, bus)) as service:
        await fleet.wait_for(lambda fleet: ready(fleet, name, bus.incarnation), Deadline.after(100))
        yield service


def ready(fleet: Fleet, name: str, incarnation: str = "") -> bool:
    card = fleet.card(name)
    return card is not None and card.state == "ready" and card.incarnation.startswith(incarnation)


def ctx() -> RequestContext:
    return RequestContext.after(30.0)


async def put(bus: Bus, name: str, root: bytes) -> bool:
    return await CacheNode(bus, name).put(CachePut("result", root, root, "t", b"m", 600_000, 5), b"value", ctx())


async def holds(bus: Bus, name: str, root: bytes) -> bool:
    return (await CacheNode(bus, name).get(CacheGet("result", (root,), root), [b"m"], ctx())) == [b"value"]


async def in_step(bus: Bus, service: CacheService) -> None:
    """Waits until the node has read the log as far as it goes now."""
    last = await bus.logs.last_seq(INVALIDATED())
    await until(lambda: service.invalidations.seq >= last)


async def test_it_follows_the_log_and_buries_the_same_roots_after_a_restart(
    nats_url: str, bus: Bus, fleet: Fleet, unique: Callable[[str], str]
) -> None:
    name, model = unique("cache"), unique("model")
    root, other = sha256(model.encode()).digest(), sha256(b"other " + model.encode()).digest()
    async with node(nats_url, fleet, name, model) as service:
        first_life = service.store.fences.incarnation
        assert await put(bus, name, root)
        assert await holds(bus, name, root)
        await bus.logs.append(INVALIDATED(), Invalidated(model, "delete", root=root))
        await in_step(bus, service)
        assert not await holds(bus, name, root)
        with pytest.raises(Conflict):
            await put(bus, name, root)
        assert await put(bus, name, other)
    async with node(nats_url, fleet, name, model) as service:
        assert service.store.fences.incarnation != first_life
        assert not await holds(bus, name, other), "a restart starts empty"
        with pytest.raises(Conflict):
            await put(bus, name, root)
        await bus.logs.append(INVALIDATED(), Invalidated(model, "restore", root=root))
        await in_step(bus, service)
        assert await put(bus, name, root)
        assert await holds(bus, name, root)


async def test_a_ring_of_two_nodes_outlives_one_of_them(
    nats_url: str, bus: Bus, fleet: Fleet, unique: Callable[[str], str]
) -> None:
    model = unique("model")
    root = sha256(model.encode()).digest()
    keys = [sha256(b"%d" % number + root).digest() for number in range(40)]
    materials, values = [b"m"] * 40, [b"value %d" % number * (1 + number * 500) for number in range(40)]
    async with (
        CacheRing(bus, fleet, replicas=2, get_s=20.0) as ring,
        node(nats_url, fleet, unique("cache"), model) as staying,
    ):
        async with node(nats_url, fleet, unique("cache"), model):
            for _ in range(5):  # a write is best effort: on a busy machine some are given up
                for key, value in zip(keys, values, strict=True):
                    ring.put("result", key, root, b"m", value, ctx(), ttl_s=600.0)
                await ring.drain(Deadline.after(100))
            assert await ring.get("result", keys, root, materials, ctx()) == values
        assert await ring.get("result", keys, root, materials, ctx()) == values
        scanned = await bus.call(CACHE_SCAN(node=staying.settings.id), CacheScan(root=root), ctx())
        assert {entry.key for entry in scanned.entries} == set(keys)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of a process from /proc")
async def test_a_process_stays_within_its_memory(
    nats_url: str, bus: Bus, fleet: Fleet, unique: Callable[[str], str]
) -> None:
    name, given = unique("cache"), 48 << 20
    environ = {**os.environ, "NATS_URL": nats_url, "PDBUS_ID": name, "PDBUS_CACHE_BYTES": str(given)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "pdbus.cache", env=environ)
    try:
        await fleet.wait_for(lambda fleet: ready(fleet, name), Deadline.after(100))
        before = resident(process.pid)
        client, noise = CacheNode(bus, name), random.Random(3)
        root = sha256(name.encode()).digest()

        async def write(number: int, size: int) -> None:
            put = CachePut("kv", sha256(b"%d" % number).digest(), root, "t", b"m", 600_000, size)
            await client.put(put, noise.randbytes(size), ctx())

        for number in range(90):  # twice what it may hold, as pages …
            await write(number, 700_000)
        for start in range(100, 4100, 100):  # … and as small answers
            await asyncio.gather(*(write(number, 300) for number in range(start, start + 100)))
        assert resident(process.pid) - before <= given
        card = fleet.card(name)
        assert card is not None
        assert 0 < card.load.bytes_used <= card.load.bytes_total <= given * 0.7
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 100) == 0


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
