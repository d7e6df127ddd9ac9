"""The ring of cache nodes as a client sees it: replicas, dead and slow nodes, bounded writes, no errors."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from hashlib import sha256
from typing import Any

import pytest

from pdbus.bus.bus import Bus, memory_bus
from pdbus.bus.codec import encode
from pdbus.bus.memory import MemoryBroker
from pdbus.bus.presence import Fleet
from pdbus.caching.ring import HashRing
from pdbus.context import Deadline, RequestContext
from pdbus.errors import InvalidRequest, Overloaded, Unavailable
from pdbus.messages.cache import CachePut, CachePutReply
from pdbus.peers.background import Background
from pdbus.peers.cache import GET_S, CacheRing
from pdbus.peers.cache_node import CacheNode
from pdbus.subjects import CACHE_PUT
from tests.support.cache_nodes import Node, cache_node
from tests.support.simulated_time import simulated

ROOT = b"\x01" * 32
KEYS = [sha256(b"%d" % number).digest() for number in range(24)]
MATERIALS = [b"material %d" % number for number in range(24)]
VALUES = [b"value %d" % number for number in range(24)]


def ctx(seconds: float = 30.0) -> RequestContext:
    return RequestContext.after(seconds)


@pytest.fixture(autouse=True)
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that failed is not tried again while a test runs, however long that takes."""
    monkeypatch.setattr("pdbus.caching.circuit._FIRST_PAUSE_S", 600.0)


@pytest.fixture
async def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[Bus]:
    async with memory_bus(broker) as bus:
        yield bus


@pytest.fixture
async def fleet(bus: Bus) -> AsyncIterator[Fleet]:
    async with Fleet(bus) as fleet:
        yield fleet


@pytest.fixture
async def nodes(broker: MemoryBroker, fleet: Fleet) -> AsyncIterator[dict[str, Node]]:
    async with AsyncExitStack() as stack:
        yield await three(broker, fleet, stack)


async def three(broker: MemoryBroker, fleet: Fleet, stack: AsyncExitStack) -> dict[str, Node]:
    nodes = {f"c-{at}": await stack.enter_async_context(cache_node(broker, f"c-{at}")) for at in range(3)}
    await fleet.wait_for(lambda fleet: len(fleet.live("cache")) == len(nodes), Deadline.after(30.0))
    return nodes


def cache_ring(bus: Bus, fleet: Fleet, replicas: int = 2, get_s: float = 30.0) -> CacheRing:
    """With patience: a quarter of a second may be over before a busy machine has done anything."""
    return CacheRing(bus, fleet, replicas=replicas, get_s=get_s)


async def filled(ring: CacheRing, values: list[bytes] = VALUES, kind: Any = "result") -> None:
    for key, material, value in zip(KEYS, MATERIALS, values, strict=False):
        assert ring.put(kind, key, ROOT, material, value, ctx(), ttl_s=60.0)
    await ring.drain(Deadline.after(30.0))
    assert ring.writing == 0


async def read(ring: CacheRing, kind: Any = "result") -> list[bytes | None]:
    return await ring.get(kind, KEYS, ROOT, MATERIALS, ctx())


async def test_each_value_lies_on_its_two_nodes_and_is_read_in_one_call_a_node(
    bus: Bus, fleet: Fleet, nodes: dict[str, Node]
) -> None:
    async with cache_ring(bus, fleet) as ring:
        assert await read(ring) == [None] * 24
        await filled(ring)
        for node in nodes.values():
            node.calls.clear()
        assert await read(ring) == VALUES
    places = HashRing(nodes)
    for name, node in nodes.items():
        held = {entry.key for entry in node.store.scan(b"", 100)[0]}
        assert held == {key for key in KEYS if name in places.owners(key, 2)}
        assert len(node.calls) <= 1


async def test_values_of_pages_travel_by_bulk_to_one_node_each(bus: Bus, fleet: Fleet, nodes: dict[str, Node]) -> None:
    pages = [random.Random(number).randbytes(300_000) for number in range(24)]
    async with cache_ring(bus, fleet, replicas=1) as ring:
        await filled(ring, pages, "kv")
        assert await read(ring, "kv") == pages
    assert sum(len(node.store) for node in nodes.values()) == 24


async def test_when_a_node_dies_its_keys_are_read_from_their_replicas(
    bus: Bus, fleet: Fleet, nodes: dict[str, Node]
) -> None:
    async with cache_ring(bus, fleet) as ring:
        await filled(ring)
        nodes["c-1"].refuses = Unavailable("gone")
        for _ in range(6):  # the first calls fail over, the later ones know
            assert await read(ring) == VALUES
        assert len(nodes["c-1"].calls) <= 4, "the circuit should have opened"


def test_a_node_that_hangs_costs_its_share_of_the_time_and_then_nothing() -> None:
    """In simulated seconds."""

    async def read_beside_it() -> list[float]:
        broker, took_s = MemoryBroker(), list[float]()
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(memory_bus(broker))
            fleet = await stack.enter_async_context(Fleet(bus))
            nodes = await three(broker, fleet, stack)
            ring = await stack.enter_async_context(cache_ring(bus, fleet, get_s=GET_S))
            await filled(ring)
            nodes["c-2"].hangs = True
            for _ in range(4):
                begun_s = time.monotonic()
                assert await read(ring) == VALUES
                took_s.append(time.monotonic() - begun_s)
        return took_s

    took_s = simulated(read_beside_it)
    assert took_s[0] == pytest.approx(GET_S / 2), "its replicas have the other half"
    assert took_s[-1] == 0, "the circuit should have opened"


async def test_nothing_is_raised_and_little_time_spent_whatever_the_nodes_do(
    bus: Bus, fleet: Fleet, nodes: dict[str, Node]
) -> None:
    async with cache_ring(bus, fleet) as ring:
        await filled(ring)
        for error in (Unavailable("x"), Overloaded("x"), InvalidRequest("x")):
            for node in nodes.values():
                node.refuses = error
            assert await read(ring) == [None] * 24
            ring.put("result", KEYS[0], ROOT, b"m", b"v", ctx(), ttl_s=1.0)
            await ring.drain(Deadline.after(30.0))
        assert await ring.get("result", KEYS, ROOT, MATERIALS, ctx(-1.0)) == [None] * 24


async def test_without_nodes_there_are_only_misses(bus: Bus, fleet: Fleet) -> None:
    async with cache_ring(bus, fleet) as ring:
        assert await read(ring) == [None] * 24
        assert not ring.put("result", KEYS[0], ROOT, b"m", b"v", ctx(), ttl_s=1.0)


async def test_a_node_that_is_not_ready_is_no_part_of_the_ring(bus: Bus, fleet: Fleet, nodes: dict[str, Node]) -> None:
    nodes["c-0"].state = "starting"
    async with cache_ring(bus, fleet) as ring:
        await fleet.wait_for(
            lambda fleet: sorted(card.state for card in fleet.live("cache")) == ["ready", "ready", "starting"],
            Deadline.after(30.0),
        )
        await filled(ring)
        assert await read(ring) == VALUES
    assert len(nodes["c-0"].store) == 0
    assert nodes["c-0"].calls == []


async def test_material_is_compared_and_age_is_kept_to(bus: Bus, fleet: Fleet, nodes: dict[str, Node]) -> None:
    async with cache_ring(bus, fleet, replicas=1) as ring:
        await filled(ring)
        assert await ring.get("result", KEYS[:1], ROOT, [b"other"], ctx()) == [None]
        assert await ring.get("result", KEYS[:1], ROOT, MATERIALS[:1], ctx(), max_age_s=60.0) == VALUES[:1]
        await asyncio.sleep(0.002)
        assert await ring.get("result", KEYS[:1], ROOT, MATERIALS[:1], ctx(), max_age_s=0.0) == [None]


async def test_no_entry_of_another_root_is_given(bus: Bus, fleet: Fleet, nodes: dict[str, Node]) -> None:
    async with cache_ring(bus, fleet) as ring:
        await filled(ring)
        assert await ring.get("result", KEYS, b"\x02" * 32, MATERIALS, ctx()) == [None] * 24


async def test_a_node_that_names_half_a_stream_is_refused_like_any_that_fails(bus: Bus, broker: MemoryBroker) -> None:
    async with memory_bus(broker) as liar:
        reply = encode(CachePutReply(False, "", "1"))
        answer = await liar.transport.subscribe(
            CACHE_PUT(node="liar").name, lambda raw: liar.transport.send(raw.reply, reply)
        )
        put = CachePut("kv", KEYS[0], ROOT, "t", b"m", 1000, 100_000)
        with pytest.raises(InvalidRequest, match="bulk stream"):
            await CacheNode(bus, "liar").put(put, bytes(100_000), ctx())
        await answer.close()


async def test_background_work_is_bounded_in_number_and_bytes() -> None:
    gate, done = asyncio.Event(), []

    async def work() -> None:
        await gate.wait()
        done.append(1)

    background = Background(at_once=2, waiting=4, waiting_bytes=100)
    assert [background.start(10, work) for _ in range(6)] == [True] * 4 + [False] * 2
    gate.set()
    await background.drain(Deadline.after(30.0))
    assert len(done) == 4
    assert background.start(100, work)
    assert not background.start(1, work)
    await background.close()
    assert len(background) == 0


async def test_background_work_that_fails_frees_its_share() -> None:
    async def fails() -> None:
        raise RuntimeError("bug")

    background = Background(at_once=1, waiting=1, waiting_bytes=10)
    for _ in range(3):
        assert background.start(10, fails)
        await background.drain(Deadline.after(30.0))
