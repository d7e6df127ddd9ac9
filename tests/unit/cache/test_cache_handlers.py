"""A cache node's answers, over the in-memory twin."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import suppress
from hashlib import sha256
from typing import Any

import pytest

from pdbus.bus.bus import Bus, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, Corrupt, DeadlineExceeded, InvalidRequest, Unavailable
from pdbus.messages.bulk import CacheHead
from pdbus.messages.cache import INLINE_BYTES, CacheDelete, CacheGet, CachePut, CacheScan
from pdbus.peers.cache_node import CacheNode
from pdbus.subjects import CACHE_DELETE, CACHE_GET, CACHE_PUT, CACHE_SCAN, TRANSFER
from tests.support.cache_nodes import Node, cache_node

R1, R2 = b"\x01" * 32, b"\x02" * 32
LARGE = random.Random(5).randbytes(1_200_000)
"""Noise: more than a message holds, and nothing for zstd."""
TEXT = b'{"text": "hello", "index": 0}' * 40_000


def key(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def put(number: int = 1, value: bytes = b"value", **changes: Any) -> CachePut:
    fields: dict[str, Any] = {
        "kind": "result", "key": key(number), "root": R1, "tenant": "t", "material": b"m", "ttl_ms": 60_000,
        "size": len(value), "value": value if len(value) <= INLINE_BYTES else None,
    }  # fmt: skip
    return CachePut(**(fields | changes))


def ctx() -> RequestContext:
    return RequestContext.after(30.0)


@pytest.fixture
async def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def node(broker: MemoryBroker) -> AsyncIterator[Node]:
    async with cache_node(broker, "c-0") as node:
        yield node


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[Bus]:
    async with memory_bus(broker) as bus:
        yield bus


async def stored(node: Node) -> None:
    await node.transfers.drain(Deadline.after(30.0))


@pytest.mark.parametrize("value", [b"", b"small", TEXT[:INLINE_BYTES], TEXT, LARGE], ids=len)
@pytest.mark.parametrize("kind", ["result", "kv"])
async def test_a_value_of_any_size_comes_back_whole(node: Node, bus: Bus, value: bytes, kind: Any) -> None:
    client = CacheNode(bus, "c-0")
    assert await client.put(put(value=value, kind=kind), value, ctx())
    await stored(node)
    assert await client.get(CacheGet(kind, (key(2), key(1)), R1), [b"m", b"m"], ctx()) == [None, value]
    await stored(node)
    assert len(node.transfers) == node.bus.bulk.open_streams == bus.bulk.open_streams == 0


async def test_large_and_small_values_come_in_one_read(node: Node, bus: Bus) -> None:
    client = CacheNode(bus, "c-0")
    values = [b"a", LARGE, TEXT, b"b", TEXT[:1000]]
    for number, value in enumerate(values):
        await client.put(put(number, value), value, ctx())
    await stored(node)
    keys = tuple(key(number) for number in range(6))
    assert await client.get(CacheGet("result", keys, R1), [b"m"] * 6, ctx()) == [*values, None]


async def test_text_is_kept_compressed_and_noise_as_it_is(node: Node, bus: Bus) -> None:
    client = CacheNode(bus, "c-0")
    await client.put(put(1, TEXT), TEXT, ctx())
    await stored(node)
    assert node.store.used_bytes < len(TEXT) / 10
    await client.put(put(2, LARGE), LARGE, ctx())
    await stored(node)
    assert node.store.used_bytes > len(LARGE)


async def test_other_material_under_the_same_key_is_no_hit(node: Node, bus: Bus) -> None:
    client = CacheNode(bus, "c-0")
    await client.put(put(), b"value", ctx())
    assert await client.get(CacheGet("result", (key(1),), R1), [b"other"], ctx()) == [None]


async def test_a_reply_never_outgrows_a_message(node: Node, bus: Bus) -> None:
    client = CacheNode(bus, "c-0")
    value = random.Random(1).randbytes(INLINE_BYTES)
    for number in range(40):
        await client.put(put(number, value), value, ctx())
    keys = tuple(key(number) for number in range(40))
    assert await client.get(CacheGet("result", keys, R1), [b"m"] * 40, ctx()) == [value] * 40


async def test_a_page_that_is_there_is_not_sent_again(node: Node, bus: Bus) -> None:
    client = CacheNode(bus, "c-0")
    assert await client.put(put(value=LARGE, kind="kv"), LARGE, ctx())
    await stored(node)
    assert not await client.put(put(value=LARGE, kind="kv"), LARGE, ctx())


async def test_too_large_a_value_is_not_kept(node: Node, bus: Bus) -> None:
    reply = await bus.call(CACHE_PUT(node="c-0"), put(value=LARGE, size=1 << 30), ctx())
    assert not reply.stored
    assert reply.stream == ""


async def test_a_transfer_that_raced_an_invalidation_is_not_kept(node: Node, bus: Bus) -> None:
    async with bus.bulk.receive():
        reply = await bus.call(CACHE_PUT(node="c-0"), put(value=LARGE), ctx())
    assert reply.stream
    node.store.bury(R1, 0.0, second=False)

    with pytest.raises(Conflict):
        async with bus.bulk.send(
            TRANSFER.name(address=reply.address, stream=reply.stream), Deadline.after(30.0)
        ) as out:
            await out.item(CacheHead(0), LARGE)
    assert len(node.store) == 0


async def test_a_writer_that_sends_another_size_than_announced_is_refused(node: Node, bus: Bus) -> None:
    reply = await bus.call(CACHE_PUT(node="c-0"), put(value=LARGE), ctx())

    with pytest.raises(Corrupt):
        async with bus.bulk.send(
            TRANSFER.name(address=reply.address, stream=reply.stream), Deadline.after(30.0)
        ) as out:
            await out.item(CacheHead(0), LARGE + b"more")
    assert len(node.store) == 0


async def test_a_reader_that_goes_away_leaves_nothing_behind(node: Node, bus: Bus) -> None:
    await CacheNode(bus, "c-0").put(put(value=LARGE), LARGE, ctx())
    await stored(node)
    async with bus.bulk.receive() as incoming:
        wanted = CacheGet("result", (key(1),), R1, receiver=bus.bulk.address, stream=incoming.stream)
        assert (await bus.call(CACHE_GET(node="c-0"), wanted, ctx())).found[0].size == len(LARGE)
    await stored(node)
    assert len(node.transfers) == node.bus.bulk.open_streams == bus.bulk.open_streams == 0


async def test_a_writer_that_goes_away_leaves_nothing_behind(node: Node, bus: Bus) -> None:
    reply = None
    while reply is None:  # a busy machine may take all of that time to answer
        with suppress(DeadlineExceeded):
            reply = await bus.call(CACHE_PUT(node="c-0"), put(value=LARGE), RequestContext.after(0.2))
    assert reply.stream
    await stored(node)
    assert len(node.transfers) == node.bus.bulk.open_streams == len(node.store) == 0


async def test_fills_are_fenced(node: Node, bus: Bus) -> None:
    miss = await bus.call(CACHE_GET(node="c-0"), CacheGet("feature", (key(1),), R1), ctx())
    fence = {"incarnation": miss.incarnation, "generation": miss.found[0].generation}
    named = put(kind="feature", name="user 1", **fence)
    assert (await bus.call(CACHE_PUT(node="c-0"), named, ctx())).stored
    assert (await bus.call(CACHE_DELETE(node="c-0"), CacheDelete(name="user 1"), ctx())).deleted == 1
    with pytest.raises(Conflict):
        await bus.call(CACHE_PUT(node="c-0"), named, ctx())
    node.store.bury(R2, 0.0, second=False)
    with pytest.raises(Conflict):
        await bus.call(CACHE_PUT(node="c-0"), put(root=R2), ctx())


async def test_deletes_and_scans(node: Node, bus: Bus) -> None:
    client = CacheNode(bus, "c-0")
    for number in range(30):
        await client.put(put(number, root=R1 if number % 3 else R2), b"value", ctx())
    seen: list[bytes] = []
    more = True
    while more:
        reply = await bus.call(CACHE_SCAN(node="c-0"), CacheScan(seen[-1] if seen else b"", 7), ctx())
        seen += [entry.key for entry in reply.entries]
        more = reply.more
    assert seen == sorted(key(number) for number in range(30))
    assert (await bus.call(CACHE_DELETE(node="c-0"), CacheDelete(root=R2), ctx())).deleted == 10
    assert (await bus.call(CACHE_DELETE(node="c-0"), CacheDelete(keys=(key(0), key(1))), ctx())).deleted == 1
    reply = await bus.call(CACHE_SCAN(node="c-0"), CacheScan(root=R2), ctx())
    assert reply.entries == ()


async def test_a_node_that_is_behind_serves_neither_reads_nor_fills(node: Node, bus: Bus) -> None:
    await CacheNode(bus, "c-0").put(put(), b"value", ctx())
    node.refuses = Unavailable("behind")
    with pytest.raises(Unavailable):
        await bus.call(CACHE_GET(node="c-0"), CacheGet("result", (key(1),), R1), ctx())
    with pytest.raises(Unavailable):
        await bus.call(CACHE_PUT(node="c-0"), put(), ctx())
    assert (await bus.call(CACHE_DELETE(node="c-0"), CacheDelete(root=R1), ctx())).deleted == 1


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (CACHE_GET, CacheGet("result", (b"short",), R1)),
        (CACHE_GET, CacheGet("result", (key(1),), b"")),
        (CACHE_GET, CacheGet("result", (key(1),) * 2000, R1)),
        (CACHE_GET, CacheGet("result", (key(1),), R1, stream="s")),
        (CACHE_PUT, put(size=4)),
        (CACHE_PUT, put(size=-1, value=LARGE)),
        (CACHE_PUT, put(ttl_ms=0)),
        (CACHE_PUT, put(root=b"x")),
        (CACHE_PUT, put(name="n" * 1000)),
        (CACHE_SCAN, CacheScan(limit=0)),
        (CACHE_SCAN, CacheScan(limit=1 << 40)),
    ],
)
async def test_wrong_requests_are_refused_and_change_nothing(node: Node, bus: Bus, subject: Any, message: Any) -> None:
    with pytest.raises(InvalidRequest):
        await bus.call(subject(node="c-0"), message, ctx())
    assert len(node.store) == 0
