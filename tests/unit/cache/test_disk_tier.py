"""A node's disk behind its memory, over the in-memory twin: written back, read, promoted, deleted, survived."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.context import Deadline, RequestContext
from pdbus.messages.cache import CacheDelete, CacheGet, CachePut, CacheScan
from pdbus.peers.cache_node import CacheNode
from pdbus.subjects import CACHE_DELETE, CACHE_SCAN
from tests.support.cache_nodes import Node, cache_node

R1, R2 = b"\x01" * 32, b"\x02" * 32
MEMORY = 4 << 20
PAGE = 200_000


def key(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def value(number: int, size: int = PAGE) -> bytes:
    return random.Random(number).randbytes(size)


def ctx() -> RequestContext:
    return RequestContext.after(30.0)


def files(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.glob("*.kv")]


class Client:
    def __init__(self, node: Node, bus: Any) -> None:
        self.node, self.bus, self.cache = node, bus, CacheNode(bus, node.name)

    async def put(self, number: int, root: bytes = R1, size: int = PAGE, kind: Any = "kv") -> None:
        made = CachePut(kind, key(number), root, "t", b"m%d" % number, 60_000, size)
        await self.cache.put(made, value(number, size), ctx())
        await self.settled()

    async def get(self, *numbers: int, root: bytes = R1, kind: Any = "kv") -> list[bytes | None]:
        wanted = CacheGet(kind, tuple(map(key, numbers)), root)
        found = await self.cache.get(wanted, [b"m%d" % number for number in numbers], ctx())
        await self.settled()
        return found

    async def settled(self) -> None:
        await self.node.transfers.drain(Deadline.after(30.0))
        assert self.node.disk
        await self.node.disk.drain(Deadline.after(30.0))
        self.node.store.check()
        self.node.disk.disk.check()


@asynccontextmanager
async def living(folder: Path, disk_bytes: int = 64 << 20) -> AsyncIterator[Client]:
    broker = MemoryBroker()
    async with cache_node(broker, "c-0", MEMORY, folder, disk_bytes) as node, memory_bus(broker) as bus:
        yield Client(node, bus)


async def test_what_the_memory_gives_up_comes_back_from_the_disk_and_is_in_memory_again(tmp_path: Path) -> None:
    async with living(tmp_path) as client:
        for number in range(60):
            await client.put(number)
        store = client.node.store
        assert len(store) < 25
        for start in range(0, 60, 10):
            numbers = range(start, start + 10)
            assert await client.get(*numbers) == [value(number) for number in numbers]
        assert key(0) not in store
        assert await client.get(0) == [value(0)]
        assert key(0) in store
        assert store.used_bytes <= store.budget_bytes


async def test_what_is_read_is_on_the_disk_before_the_memory_gives_it_up_and_only_once(tmp_path: Path) -> None:
    async with living(tmp_path) as client:
        await client.put(1)
        assert key(1) not in client.node.disk.disk
        for _ in range(3):
            await client.get(1)
        assert key(1) in client.node.disk.disk
        assert PAGE < sum(len(content.rstrip(b"\0")) for content in files(tmp_path)) < 2 * PAGE


async def test_a_page_on_the_disk_is_not_sent_again(tmp_path: Path) -> None:
    async with living(tmp_path) as client:
        for number in range(40):
            await client.put(number)
        assert key(0) not in client.node.store
        made = CachePut("kv", key(0), R1, "t", b"m0", 60_000, PAGE)
        assert not await client.cache.put(made, value(0), ctx())


async def test_small_pages_travel_inside_the_reply_from_the_disk_too(tmp_path: Path) -> None:
    async with living(tmp_path) as client:
        for number in range(600):
            await client.put(number, size=10_000)
        assert key(0) not in client.node.store
        assert await client.get(*range(12)) == [value(number, 10_000) for number in range(12)]


async def test_answers_and_named_entries_never_go_to_the_disk(tmp_path: Path) -> None:
    async with living(tmp_path) as client:
        for number in range(40):
            await client.put(number, kind="result")
        await client.get(39, kind="result")
        assert len(client.node.disk.disk) == 0
        await client.put(100)
        await client.get(100)
        assert await client.get(100, kind="result") == [None]


async def test_another_life_serves_what_was_there_but_nothing_of_a_buried_root(tmp_path: Path) -> None:
    async with living(tmp_path) as client:
        for number in range(10):
            await client.put(number, root=R1 if number < 5 else R2)
        await client.get(*range(5), root=R1)
        await client.get(*range(5, 10), root=R2)
        assert len(client.node.disk.disk) == 10
    async with living(tmp_path) as client:
        client.node.store.bury(R1, 0.0, second=False)  # the log is replayed before anything is served
        assert await client.get(*range(10), root=R2) == [None] * 5 + [value(number) for number in range(5, 10)]
        assert await client.get(*range(10), root=R1) == [None] * 5 + [value(number) for number in range(5, 10)]
    async with living(tmp_path) as client:
        assert len(client.node.disk.disk) == 5


async def test_a_root_that_is_buried_is_not_read_from_the_disk_nor_adopts_pages(tmp_path: Path) -> None:
    async with living(tmp_path) as client:
        for number in range(40):
            await client.put(number)
        client.node.store.bury(R2, 0.0, second=False)
        assert await client.get(0, root=R2) == [None]
        client.node.store.bury(R2, 0.0, second=True)
        assert await client.get(0) == [value(0)]


async def test_a_page_read_from_memory_under_another_root_outlives_the_older_one_on_disk_too(
    tmp_path: Path,
) -> None:
    async with living(tmp_path) as client:
        await client.put(1)
        await client.get(1)
        assert await client.get(1, root=R2) == [value(1)]
        assert client.node.store.bury(R1, 0.0, second=False) == 0
        assert key(1) in client.node.disk.disk
        assert client.node.store.bury(R2, 0.0, second=False) == 2


@pytest.mark.parametrize("how", ["keys", "root", "clear"])
async def test_deleting_reaches_what_waits_and_what_is_on_the_disk(tmp_path: Path, how: str) -> None:
    async with living(tmp_path) as client:
        for number in range(40):
            await client.put(number)
        store = client.node.store
        for number in range(20, 40):  # on their way to the disk, none written yet
            store.get("kv", key(number), R1, 0.0)
        match how:
            case "keys":
                wanted = CacheDelete(tuple(map(key, range(40))))
                assert (await client.bus.call(CACHE_DELETE(node="c-0"), wanted, ctx())).deleted >= 40
            case "root":
                assert store.bury(R1, 0.0, second=False) >= 40
            case "clear":
                store.clear("new")
        await client.settled()
        assert len(client.node.disk.disk) == len(store) == 0
        assert await client.get(*range(40)) == [None] * 40
    async with living(tmp_path) as client:
        assert len(client.node.disk.disk) == 0


async def test_a_scan_sees_every_tier_once(tmp_path: Path) -> None:
    async with living(tmp_path) as client:
        for number in range(40):
            await client.put(number, root=R1 if number % 2 else R2)
        seen: list[bytes] = []
        more = True
        while more:
            after = seen[-1] if seen else b""
            reply = await client.bus.call(CACHE_SCAN(node="c-0"), CacheScan(after, 7), ctx())
            seen += [entry.key for entry in reply.entries]
            more = reply.more
        assert seen == sorted(map(key, range(40)))
        reply = await client.bus.call(CACHE_SCAN(node="c-0"), CacheScan(root=R1), ctx())
        assert {entry.key for entry in reply.entries} == {key(number) for number in range(1, 40, 2)}


async def test_a_damaged_page_is_a_miss_and_gone(tmp_path: Path) -> None:
    async with living(tmp_path) as client:
        for number in range(40):
            await client.put(number)
        disk = client.node.disk.disk
        found = disk.peek(key(0))
        assert found
        with found.segment.path.open("r+b") as file:
            file.seek(found.offset + found.head.value_at)
            file.write(b"other")
        assert await client.get(0, 1) == [None, value(1)]
        assert key(0) not in disk


async def test_a_disk_that_is_full_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async with living(tmp_path) as client:
        monkeypatch.setattr("pdbus.caching.segment.os.pwritev", full)
        for number in range(40):
            await client.put(number)
        assert len(client.node.disk.disk) == 0
        assert await client.get(39) == [value(39)]


async def test_a_folder_that_can_t_be_used_leaves_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    async with living(tmp_path / "file") as client:
        for number in range(40):
            await client.put(number)
        assert await client.get(39) == [value(39)]


async def test_hot_pages_move_on_and_the_budget_is_kept(tmp_path: Path) -> None:
    async with living(tmp_path, disk_bytes=16 << 20) as client:
        for number in range(200):
            await client.put(number)
            if number % 10 == 0:
                assert await client.get(0) == [value(0)]
        assert client.node.disk.disk.used_bytes <= 16 << 20
        assert sum(map(len, files(tmp_path))) <= 16 << 20
