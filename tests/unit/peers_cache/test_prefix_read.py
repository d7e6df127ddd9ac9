"""A prefix is read from several nodes at once, as it comes, and is of use up to the first page that is not whole."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from pdbus.buffer import Buffer
from pdbus.bus.bulk_frames import FRAME_BYTES
from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Corrupt, Unavailable
from pdbus.peers.cache import CacheRing
from pdbus.peers.cache_prefix import PrefixRead
from tests.support.cache_nodes import Node, cache_node

ROOT = b"\x01" * 32
PARTS, SMALL, LARGE = 5, 1000, 300_000
MANY = 30
KEYS = [sha256(b"page %d" % number).digest() for number in range(MANY)]
MATERIALS = [b"tokens of %d" % number for number in range(MANY)]


def values(size: int) -> list[bytes]:
    return [random.Random(number).randbytes(size) for number in range(MANY)]


def ctx() -> RequestContext:
    return RequestContext.after(30.0)


class Pages:
    """Where the values are put together."""

    def __init__(self, size: int) -> None:
        self.content = [bytearray(size) for _ in range(MANY)]
        self.read = PrefixRead(MANY, size, PARTS, self._take)
        self._part = size // PARTS

    def _take(self, places: Sequence[int], part: int, parts: int, body: Buffer) -> None:
        size = parts * self._part
        for at, place in enumerate(places):
            self.content[place][part * self._part : part * self._part + size] = body[at * size : (at + 1) * size]


@asynccontextmanager
async def ring_of(
    nodes: int, size: int, folder: Path | None = None, memory_bytes: int = 4 << 20
) -> AsyncIterator[tuple[CacheRing, list[Node]]]:
    """Nodes that have all the values."""
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        bus = await enter(memory_bus(broker))
        fleet = await enter(Fleet(bus))
        all_nodes = [await enter(cache_node(broker, f"c-{at}", memory_bytes, folder)) for at in range(nodes)]
        await fleet.wait_for(lambda fleet: len(fleet.live("cache")) == nodes, Deadline.after(30.0))
        ring = await enter(CacheRing(bus, fleet, replicas=1))
        for key, material, value in zip(KEYS, MATERIALS, values(size), strict=True):
            assert await ring.write("kv", key, ROOT, material, value, ctx(), ttl_s=60.0)
        yield ring, all_nodes


async def read(ring: CacheRing, pages: Pages, materials: list[bytes] = MATERIALS) -> int:
    return await ring.read_prefix(KEYS, ROOT, materials, pages.read, ctx(), within_s=30.0)


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_all_pages_come_whole_from_all_nodes(size: int) -> None:
    async with ring_of(3, size if size == SMALL else 100_000) as (ring, nodes):
        wanted = values(SMALL if size == SMALL else 100_000)
        pages = Pages(len(wanted[0]))
        assert await read(ring, pages) == MANY
        assert pages.content == wanted
        assert all(node.calls for node in nodes)


async def test_it_is_of_use_up_to_the_first_that_is_gone_or_has_other_tokens(tmp_path: Path) -> None:
    async with ring_of(1, LARGE, memory_bytes=16 << 20) as (ring, nodes):
        assert await read(ring, Pages(LARGE)) == MANY
        other = [*MATERIALS[:20], b"other tokens", *MATERIALS[21:]]
        together = FRAME_BYTES // (LARGE // PARTS)  # it shares a run with some of those before it
        assert await read(ring, Pages(LARGE), other) in range(20 - together, 21)
        nodes[0].store.delete([KEYS[11]])
        pages = Pages(LARGE)
        assert await read(ring, pages) == 11
        assert pages.content[:11] == values(LARGE)[:11]


async def test_what_the_memory_gave_up_comes_from_the_disk(tmp_path: Path) -> None:
    async with ring_of(1, 200_000, tmp_path) as (ring, nodes):
        assert nodes[0].disk
        await nodes[0].disk.drain(Deadline.after(30.0))
        gone = sum(key not in nodes[0].store for key in KEYS)
        pages = Pages(200_000)
        assert await read(ring, pages) == MANY
        assert pages.content == values(200_000)
        assert sum(pages.read.on_disk) == gone > 5


async def test_a_node_that_refuses_costs_its_pages_and_raises_nothing() -> None:
    async with ring_of(2, SMALL) as (ring, nodes):
        nodes[1].refuses = Unavailable("behind")
        pages = Pages(SMALL)
        whole = await read(ring, pages)
        assert pages.content[:whole] == values(SMALL)[:whole]
        assert whole < MANY


async def test_pages_of_another_size_are_not_taken() -> None:
    async with ring_of(1, SMALL) as (ring, _):
        assert await read(ring, Pages(2 * SMALL)) == 0


def test_a_piece_that_is_not_the_next_one_is_refused() -> None:
    taken: list[tuple[Sequence[int], int, int]] = []
    read = PrefixRead(3, 10, 5, lambda places, part, parts, body: taken.append((places, part, parts)))
    read.take([0, 1], 0, 2, bytes(8))
    for places, part, parts, size in (
        ([0], 3, 1, 2),
        ([0, 2], 2, 1, 4),
        ([0], 2, 4, 8),
        ([0], 2, 1, 3),
        ([0], 2, 0, 0),
    ):
        with pytest.raises(Corrupt):
            read.take(places, part, parts, bytes(size))
    assert read.whole == 0
    read.take([0], 2, 3, bytes(6))
    assert read.whole == 1
    assert len(taken) == 2
