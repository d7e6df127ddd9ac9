"""A cache node with a disk against a real server: what another life may serve, and what it never may."""

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
from pdbus.cache.logbook import Logbook, Place
from pdbus.cache.service import CacheService
from pdbus.cache.settings import CacheSettings
from pdbus.context import Deadline, RequestContext
from pdbus.messages.cache import CacheGet, CachePut
from pdbus.messages.debug import Holdings, HoldingsWanted
from pdbus.messages.workers import Invalidated
from pdbus.peers.cache_node import CacheNode
from pdbus.subjects import DEBUG, INVALIDATED, To
from tests.support.living import living
from tests.support.until import until

PAGE = b"a page of KV" * 10_000


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with connect(nats_url, name="test") as bus:
        yield bus


@pytest.fixture
async def fleet(bus: Bus) -> AsyncIterator[Fleet]:
    async with Fleet(bus) as fleet:
        yield fleet


@contextlib.asynccontextmanager
async def node(nats_url: str, fleet: Fleet, name: str, folder: Path) -> AsyncIterator[CacheService]:
    settings = CacheSettings(
        nats_url=nats_url, id=name, model="m", cache_bytes=16 << 20, data=folder, disk_bytes=16 << 20
    )
    async with connect(nats_url, name=name) as bus, living(CacheService(settings, bus)) as service:
        yield service


def ctx() -> RequestContext:
    return RequestContext.after(30.0)


async def store(bus: Bus, service: CacheService, root: bytes) -> None:
    """A page of that root, on the disk."""
    client = CacheNode(bus, service.settings.id)
    await client.put(CachePut("kv", root, root, "t", b"m", 600_000, len(PAGE)), PAGE, ctx())
    await until(lambda: root in service.store)
    assert await serves(bus, service, root)
    assert service.disk
    await service.disk.drain(Deadline.after(30.0))
    assert service.disk.disk.peek(root)


async def serves(bus: Bus, service: CacheService, root: bytes) -> bool:
    found = await CacheNode(bus, service.settings.id).get(CacheGet("kv", (root,), root), [b"m"], ctx())
    return found == [PAGE]


async def in_step(bus: Bus, service: CacheService) -> None:
    last = await bus.logs.last_seq(INVALIDATED())
    await until(lambda: service.invalidations.seq >= last)


@pytest.fixture
def roots(unique: Callable[[str], str]) -> list[bytes]:
    return [sha256(unique("root").encode()).digest() for _ in range(3)]


async def test_a_restart_serves_what_was_there_and_nothing_that_was_deleted_before_or_meanwhile(
    nats_url: str, bus: Bus, fleet: Fleet, unique: Callable[[str], str], tmp_path: Path, roots: list[bytes]
) -> None:
    name = unique("cache")
    kept, before, meanwhile = roots
    async with node(nats_url, fleet, name, tmp_path) as service:
        for root in roots:
            await store(bus, service, root)
        await bus.logs.append(INVALIDATED(), Invalidated("m", "delete", root=before))
        await in_step(bus, service)
        assert not await serves(bus, service, before)
    await bus.logs.append(INVALIDATED(), Invalidated("m", "delete", root=meanwhile))
    async with node(nats_url, fleet, name, tmp_path) as service:
        assert len(service.store) == 0
        assert not await serves(bus, service, meanwhile), "its first answer must know of the log's last entry"
        assert not await serves(bus, service, before)
        assert await serves(bus, service, kept)


async def test_a_node_that_may_have_missed_an_invalidation_gives_its_disk_up(
    nats_url: str, bus: Bus, fleet: Fleet, unique: Callable[[str], str], tmp_path: Path, roots: list[bytes]
) -> None:
    name, root = unique("cache"), roots[0]
    book = Logbook(tmp_path / "kv" / "log.json")
    for lost in (Place("another log", 0), None):
        async with node(nats_url, fleet, name, tmp_path) as service:
            await store(bus, service, root)
        if lost:
            book.write(lost)
        else:
            (tmp_path / "kv" / "log.json").unlink()
        async with node(nats_url, fleet, name, tmp_path) as service:
            assert not await serves(bus, service, root)
            assert service.disk
            assert len(service.disk.disk) == 0


async def test_after_kill_9_in_the_middle_of_writing_pages_are_whole_or_absent(
    nats_url: str, bus: Bus, fleet: Fleet, unique: Callable[[str], str], tmp_path: Path
) -> None:
    name, noise = unique("cache"), random.Random(8)
    values = {sha256(b"%d" % number + name.encode()).digest(): noise.randbytes(150_000) for number in range(60)}
    root = sha256(name.encode()).digest()
    environ = {"NATS_URL": nats_url, "PDBUS_ID": name, "PDBUS_DATA": str(tmp_path), "PDBUS_CACHE_BYTES": str(8 << 20)}

    async def started() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pdbus.cache", env={**os.environ, **environ}
        )
        known = {card.incarnation for card in fleet.live("cache") if card.id == name}
        await fleet.wait_for(
            lambda fleet: any(
                card.id == name and card.state == "ready" and card.incarnation not in known
                for card in fleet.live("cache")
            ),
            Deadline.after(100),
        )
        return process

    async def read(key: bytes) -> bytes | None:
        (found,) = await CacheNode(bus, name).get(CacheGet("kv", (key,), root), [b"m"], ctx())
        return found

    process = await started()
    client = CacheNode(bus, name)
    for key, value in values.items():  # more than the memory holds: some are on the disk, and some on their way there
        await client.put(CachePut("kv", key, root, "t", b"m", 600_000, len(value)), value, ctx())
    wanted: To[HoldingsWanted, Holdings] = DEBUG(service="cache", id=name)
    while (await bus.call(wanted, HoldingsWanted(), ctx())).kept["disk_entries"] < 10:
        pass
    process.kill()
    await process.wait()
    process = await started()
    try:
        found = {key: await read(key) for key in values}
        assert all(value in (None, values[key]) for key, value in found.items())
        assert sum(value is not None for value in found.values()) >= 10
    finally:
        process.terminate()
        await process.wait()


async def test_without_a_data_folder_or_with_no_bytes_there_is_no_disk(tmp_path: Path, bus: Bus) -> None:
    assert CacheService(CacheSettings(), bus).disk is None
    assert CacheService(CacheSettings(data=tmp_path, disk_bytes=0), bus).disk is None
