from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdbus.bus.bus import Bus, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.context import Deadline, RequestContext
from pdbus.errors import DeadlineExceeded, InvalidRequest, NotFound, Overloaded, TooLarge, Unavailable
from pdbus.messages.bulk import BlockHead
from pdbus.messages.param_server import BlocksReply, BlocksRequest
from pdbus.param_server import serving
from pdbus.param_server.serving import BlockServer
from pdbus.param_server.store import BlockStore
from pdbus.subjects import WEIGHT_BLOCKS, WEIGHT_BLOCKS_OF
from tests.support.weights import manifest_and_blocks, some_arrays

MODEL = "m"
MANIFEST, BLOCKS = manifest_and_blocks(some_arrays())
NAMED = WEIGHT_BLOCKS_OF(model=MODEL, server="a")
UNKNOWN = b"?" * 32


@dataclass
class Stage:
    server: BlockServer
    serving: Bus
    client: Bus

    async def ask(self, *digests: bytes, receiver: str | None = None, stream: str = "s") -> BlocksReply:
        message = BlocksRequest(digests, receiver or self.client.bulk.address, stream)
        return await self.client.call(NAMED, message, RequestContext.after(30))

    async def idle(self) -> None:
        await self.server.drain(Deadline.after(30))
        assert self.server.sending == self.server.waiting == self.serving.bulk.open_streams == 0


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    broker = MemoryBroker()
    with BlockStore(tmp_path, MODEL) as store:
        with store.writing() as pack:
            for digest, content in BLOCKS.items():
                pack.add(digest, memoryview(content))
        async with (
            memory_bus(broker) as bus,
            memory_bus(broker) as client,
            BlockServer(bus, MODEL, "a", store) as server,
        ):
            yield Stage(server, bus, client)


async def test_the_reply_says_what_comes_and_what_is_lacking(stage: Stage) -> None:
    digest, content = next(iter(BLOCKS.items()))
    async with stage.client.bulk.receive() as incoming:
        reply = await stage.ask(UNKNOWN, digest, stream=incoming.stream)
        assert reply == BlocksReply("a", (-1, len(content)))
        items = [(head, bytes(body)) async for head, body in incoming.items(BlockHead, Deadline.after(30))]
    assert items == [(BlockHead(1), content)]
    await stage.idle()


async def test_unknown_blocks_are_not_found(stage: Stage) -> None:
    with pytest.raises(NotFound, match="none of these 2"):
        await stage.ask(UNKNOWN, b"!" * 32)
    await stage.idle()


@pytest.mark.parametrize(
    ("digests", "receiver", "stream", "param"),
    [
        ((), "r", "s", "digests"),
        ((b"short",), "r", "s", "digests"),
        ((UNKNOWN + b"x",), "r", "s", "digests"),
        ((UNKNOWN, UNKNOWN), "r", "s", "digests"),
        ((UNKNOWN,), "*", "s", "receiver"),
        ((UNKNOWN,), "a.b", "s", "receiver"),
        ((UNKNOWN,), "r" * 129, "s", "receiver"),
        ((UNKNOWN,), "r", "", "stream"),
        ((UNKNOWN,), "r", ">", "stream"),
    ],
)
async def test_a_malformed_request_is_refused_with_the_field(
    stage: Stage, digests: tuple[bytes, ...], receiver: str, stream: str, param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await stage.ask(*digests, receiver=receiver, stream=stream)
    assert refused.value.param == param
    await stage.idle()


async def test_too_many_blocks_at_once_are_refused(stage: Stage) -> None:
    many = tuple(index.to_bytes(32, "big") for index in range(serving.MAX_BLOCKS + 1))
    with pytest.raises(TooLarge, match="at most 1024"):
        await stage.ask(*many)


async def test_a_stream_that_nobody_receives_ends_and_frees_its_slot(stage: Stage) -> None:
    digest = next(iter(BLOCKS))
    for _ in range(2 * serving.SENDING):
        await stage.ask(digest, stream="nobody-s")
    await stage.idle()


async def test_a_receiver_that_does_not_exist_frees_the_slot_too(stage: Stage) -> None:
    await stage.ask(next(iter(BLOCKS)), receiver="nobody")
    await stage.idle()


async def test_readers_beyond_the_streams_wait_and_beyond_that_are_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "WAITING", 2)
    release = asyncio.Event()

    async def held(*args: object) -> None:
        await release.wait()

    monkeypatch.setattr(stage.server, "_send", held)
    digest = next(iter(BLOCKS))
    for _ in range(serving.SENDING):
        await stage.ask(digest)
    waiting = [asyncio.create_task(stage.ask(digest)) for _ in range(2)]
    while stage.server.waiting < 2:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await stage.ask(digest)
    release.set()
    assert [reply.server for reply in await asyncio.gather(*waiting)] == ["a", "a"]
    await stage.idle()


async def test_a_reader_that_goes_away_while_it_waits_takes_no_slot(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = asyncio.Event()

    async def held(*args: object) -> None:
        await release.wait()

    monkeypatch.setattr(stage.server, "_send", held)
    digest = next(iter(BLOCKS))
    for _ in range(serving.SENDING):
        await stage.ask(digest)
    message = BlocksRequest((digest,), "r", "s")
    late = asyncio.create_task(stage.client.call(NAMED, message, RequestContext.after(0.1)))
    with pytest.raises(DeadlineExceeded):
        await late
    release.set()
    await stage.idle()
    assert (await stage.ask(digest)).server == "a"


async def test_only_joined_shards_are_served_as_a_group_and_none_after_the_stop(stage: Stage) -> None:
    digest = next(iter(BLOCKS))
    message = BlocksRequest((digest,), stage.client.bulk.address, "s")

    async def ask(shard: int) -> str:
        to = WEIGHT_BLOCKS(model=MODEL, shard=str(shard))
        return (await stage.client.call(to, message, RequestContext.after(30))).server

    await stage.server.join(frozenset({1, 2}))
    await stage.server.join(frozenset({2, 3}))
    assert [await ask(2), await ask(3)] == ["a", "a"]
    with pytest.raises(Unavailable):
        await ask(1)
    await stage.server.stop_intake()
    for shard in (2, 3):
        with pytest.raises(Unavailable):
            await ask(shard)
    with pytest.raises(Unavailable):
        await stage.ask(digest)
    await stage.idle()
