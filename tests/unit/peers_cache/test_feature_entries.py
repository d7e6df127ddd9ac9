"""Features in real cache nodes: batches, nodes that fail, and the fences of named ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.bus.presence import Fleet
from pdbus.caching.feature_key import FeatureKey, embedding_key, named_key
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Unavailable
from pdbus.messages.cache import CacheGet
from pdbus.peers import feature_entries
from pdbus.peers.cache import CacheRing
from pdbus.peers.feature_entries import FeatureEntries
from tests.support.cache_nodes import Node, cache_node
from tests.support.simulated_time import simulated

ROOT = b"\x01" * 32
KEYS = [embedding_key(tenant="t", salt=b"s", root=ROOT, compute_class="c", ids=(at,)) for at in range(600)]
NAMED = named_key(model="m", subject="a.b", item="item")


def ctx(seconds: float = 30.0) -> RequestContext:
    return RequestContext.after(seconds)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a second may be over before a busy machine has done anything."""
    monkeypatch.setattr(feature_entries, "GET_S", 30.0)


@pytest.fixture
async def entries_and_nodes() -> AsyncIterator[tuple[FeatureEntries, dict[str, Node]]]:
    async with house() as made:
        yield made


@asynccontextmanager
async def house() -> AsyncIterator[tuple[FeatureEntries, dict[str, Node]]]:
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(memory_bus(broker))
        fleet = await stack.enter_async_context(Fleet(bus))
        nodes = {f"c-{at}": await stack.enter_async_context(cache_node(broker, f"c-{at}")) for at in range(2)}
        await fleet.wait_for(lambda fleet: len(fleet.live("cache")) == len(nodes), Deadline.after(30.0))
        ring = await stack.enter_async_context(CacheRing(bus, fleet, replicas=1))
        yield FeatureEntries(ring), nodes


@pytest.fixture
def entries(entries_and_nodes: tuple[FeatureEntries, dict[str, Node]]) -> FeatureEntries:
    return entries_and_nodes[0]


@pytest.fixture
def nodes(entries_and_nodes: tuple[FeatureEntries, dict[str, Node]]) -> dict[str, Node]:
    return entries_and_nodes[1]


def owner(nodes: dict[str, Node], key: FeatureKey) -> Node:
    (found,) = (node for node in nodes.values() if key.key in node.store)
    return found


async def put_all(entries: FeatureEntries) -> None:
    for key in KEYS:
        assert await entries.put(key, ROOT, b"v%d" % KEYS.index(key), None, ctx(), ttl_s=60)


async def test_many_are_read_in_one_round_from_all_nodes(entries: FeatureEntries, nodes: dict[str, Node]):
    await put_all(entries)
    assert all(len(node.store) > 150 for node in nodes.values())
    found = await entries.get(list(reversed(KEYS)), ROOT, ctx())
    assert [one.value for one in found] == [b"v%d" % at for at in reversed(range(600))]
    calls = [call for node in nodes.values() for call in node.calls if isinstance(call, CacheGet)]
    assert max(len(call.keys) for call in calls) <= 256
    assert len(calls) <= 4


async def test_other_material_another_root_and_too_old_ones_are_not_there(entries: FeatureEntries):
    key = KEYS[0]
    await entries.put(key, ROOT, b"v", None, ctx(), ttl_s=60)
    other = FeatureKey(key.key, b"another", "")
    assert [one.value for one in await entries.get([key, other], ROOT, ctx())] == [b"v", None]
    assert (await entries.get([key], b"\x02" * 32, ctx()))[0].value is None
    assert (await entries.get([key], ROOT, ctx(), max_age_s=0.0))[0].value is None


async def test_a_named_one_needs_the_fence_of_its_miss(entries: FeatureEntries, nodes: dict[str, Node]):
    assert not await entries.put(NAMED, ROOT, b"v", None, ctx(), ttl_s=60)
    (missed,) = await entries.get([NAMED], ROOT, ctx())
    assert missed.fence
    assert await entries.put(NAMED, ROOT, b"v", missed.fence, ctx(), ttl_s=60)
    (found,) = await entries.get([NAMED], ROOT, ctx())
    assert (found.value, found.fence) == (b"v", missed.fence)
    owner(nodes, NAMED).store.delete_name(NAMED.name)
    assert not await entries.put(NAMED, ROOT, b"late", missed.fence, ctx(), ttl_s=60)
    (gone,) = await entries.get([NAMED], ROOT, ctx())
    assert gone.value is None
    assert gone.fence != missed.fence
    assert await entries.put(NAMED, ROOT, b"new", gone.fence, ctx(), ttl_s=60)


async def test_a_hit_tells_a_fence_that_its_own_replacement_may_use(entries: FeatureEntries, nodes: dict[str, Node]):
    (missed,) = await entries.get([NAMED], ROOT, ctx())
    await entries.put(NAMED, ROOT, b"old", missed.fence, ctx(), ttl_s=60)
    owner(nodes, NAMED).store.delete_name("another name")
    (found,) = await entries.get([NAMED], ROOT, ctx())
    assert await entries.put(NAMED, ROOT, b"new", found.fence, ctx(), ttl_s=60)
    assert (await entries.get([NAMED], ROOT, ctx()))[0].value == b"new"


async def test_a_fill_of_a_deleted_root_is_refused(entries: FeatureEntries, nodes: dict[str, Node]):
    for node in nodes.values():
        node.store.bury(ROOT, time.monotonic(), second=False)
    assert not await entries.put(KEYS[0], ROOT, b"v", None, ctx(), ttl_s=60)


async def test_deleting_reaches_each_key_s_node(entries: FeatureEntries, nodes: dict[str, Node]):
    await put_all(entries)
    await entries.delete([key.key for key in KEYS[:300]], ctx())
    assert sum(len(node.store) for node in nodes.values()) == 300
    assert [one.value for one in await entries.get(KEYS[:300], ROOT, ctx())] == [None] * 300


@pytest.mark.parametrize("fault", ["hangs", "refuses"])
def test_a_node_that_fails_costs_misses_and_little_time(fault: str):
    """In simulated seconds."""

    async def get_beside_it() -> float:
        async with house() as (entries, nodes):
            await put_all(entries)
            nodes["c-0"].hangs = fault == "hangs"
            nodes["c-0"].refuses = None if fault == "hangs" else Unavailable("not now")
            begun_s = time.monotonic()
            found = await entries.get(KEYS, ROOT, ctx())
            took_s = time.monotonic() - begun_s
            known = [key.key in nodes["c-1"].store for key in KEYS]
            assert [one.value is not None for one in found] == known
            assert [one.fence is not None for one in found] == known
            return took_s

    assert simulated(get_beside_it) == pytest.approx(feature_entries.GET_S if fault == "hangs" else 0)


async def test_without_nodes_nothing_is_there_and_nothing_is_raised():
    async with memory_bus(MemoryBroker()) as bus, Fleet(bus) as fleet, CacheRing(bus, fleet, replicas=1) as ring:
        entries = FeatureEntries(ring)
        assert [one.value for one in await entries.get(KEYS[:2], ROOT, ctx())] == [None, None]
        assert not await entries.put(KEYS[0], ROOT, b"v", None, ctx(), ttl_s=60)
        await asyncio.wait_for(entries.delete([KEYS[0].key], ctx()), 30)
