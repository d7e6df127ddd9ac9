from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdbus.bus.bus import Bus, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.context import RequestContext
from pdbus.errors import Corrupt, DeadlineExceeded, NotFound, Unavailable
from pdbus.messages.bulk import BlockHead
from pdbus.messages.param_server import BlocksReply, BlocksRequest
from pdbus.param_server.serving import BlockServer
from pdbus.param_server.store import BlockStore
from pdbus.peers import blocks as blocks_module
from pdbus.peers.weights import BlockReader
from pdbus.subjects import TRANSFER, WEIGHT_BLOCKS, WEIGHT_BLOCKS_OF
from pdbus.weights.blocks import SHARDS, rows_per_block
from tests.support.weights import META, following, manifest_and_blocks, some_arrays

MODEL = "m"
ARRAYS = some_arrays()
MANIFEST, BLOCKS = manifest_and_blocks(ARRAYS)
ROOT = MANIFEST.root
ALL = frozenset(range(SHARDS))


class House:
    """Param-servers and a reader on one in-memory broker."""

    def __init__(self, life: AsyncExitStack, folder: Path) -> None:
        self.broker = MemoryBroker()
        self._life = life
        self._folder = folder

    async def bus(self) -> Bus:
        return await self._life.enter_async_context(memory_bus(self.broker))

    async def server(
        self, name: str, blocks: Mapping[bytes, bytes] = BLOCKS, shards: frozenset[int] = frozenset()
    ) -> BlockServer:
        store = self._life.enter_context(BlockStore(self._folder / name, MODEL))
        with store.writing() as pack:
            for digest, content in blocks.items():
                pack.add(digest, memoryview(content))
        server = await self._life.enter_async_context(BlockServer(await self.bus(), MODEL, name, store))
        await server.join(shards)
        return server

    async def rogue(self, name: str, behave: Any, group: bool = False) -> list[BlocksRequest]:
        """A server that does `behave(out, digests)` with the stream; returns the requests that it got."""
        bus, asked = await self.bus(), []
        tasks: set[asyncio.Task[None]] = set()

        async def send(message: BlocksRequest, ctx: RequestContext) -> None:
            subject = TRANSFER.name(address=message.receiver, stream=message.stream)
            try:
                async with bus.bulk.send(subject, ctx.deadline) as out:
                    await behave(out, message.digests)
            except Exception:  # what becomes of it is the reader's to say
                return

        async def answer(message: BlocksRequest, ctx: RequestContext) -> BlocksReply:
            asked.append(message)
            tasks.add(asyncio.create_task(send(message, ctx)))
            return BlocksReply(name, tuple(len(BLOCKS[digest]) for digest in message.digests))

        await bus.serve(WEIGHT_BLOCKS_OF(model=MODEL, server=name), answer)
        for shard in range(SHARDS) if group else ():
            await bus.serve(WEIGHT_BLOCKS(model=MODEL, shard=str(shard)), answer)
        return asked

    async def reader(self, *members: str) -> BlockReader:
        return BlockReader(await self.bus(), MODEL, following(members, ROOT))


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with AsyncExitStack() as life:
        yield House(life, tmp_path)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "STALL_S", 0.3)
    monkeypatch.setattr(blocks_module, "REPLY_S", 0.3)


def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For who counts requests: none is made a second time because a busy machine took a moment for the first."""
    monkeypatch.setattr(blocks_module, "STALL_S", 60.0)
    monkeypatch.setattr(blocks_module, "REPLY_S", 60.0)


def ctx(seconds: float = 30.0) -> RequestContext:
    return RequestContext.after(seconds)


def same(arrays: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray] = ARRAYS) -> bool:
    return arrays.keys() == expected.keys() and all(
        arrays[name].shape == array.shape and np.array_equal(arrays[name], array) for name, array in expected.items()
    )


async def test_a_version_is_read_whole(house: House) -> None:
    await house.server("a", shards=ALL)
    reader = await house.reader("a")
    steps: list[tuple[int, int]] = []
    assert same(await reader.tensors(ROOT, ctx(), progress=lambda done, total: steps.append((done, total))))
    assert await reader.meta(ROOT, ctx()) == META
    assert await reader.manifest(ROOT, ctx()) == MANIFEST
    total = sum(array.nbytes for array in ARRAYS.values())
    assert steps[-1] == (total, total)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


async def test_named_tensors_are_read_alone_and_an_unknown_one_is_told(house: House) -> None:
    await house.server("a", shards=ALL)
    reader = await house.reader("a")
    name = "model.layers.0.input_layernorm.weight"
    assert same(await reader.tensors(ROOT, ctx(), [name]), {name: ARRAYS[name]})
    with pytest.raises(NotFound, match="no tensor nope"):
        await reader.tensors(ROOT, ctx(), ["nope"])


async def test_a_run_of_rows_is_read_without_the_others(house: House) -> None:
    await house.server("a", shards=ALL)
    reader = await house.reader("a")
    name = "model.embed_tokens.weight"
    step = rows_per_block((1000, 576), "fp32")
    moved: list[int] = []
    for rows in (slice(0, step), slice(2 * step, 5 * step), slice(8 * step, 1000)):
        read = await reader.tensors(ROOT, ctx(), [name], rows=rows, progress=lambda done, total: moved.append(total))
        assert same(read, {name: ARRAYS[name][rows]})
        assert moved[-1] == read[name].nbytes
    for rows in (slice(1, step), slice(0, step + 1), slice(0, 1001), slice(step, step)):
        with pytest.raises(ValueError, match="not whole blocks"):
            await reader.tensors(ROOT, ctx(), [name], rows=rows)


async def test_the_blocks_of_a_layer_are_asked_for_in_few_requests(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def in_order(out: Any, digests: Sequence[bytes]) -> None:
        for index, digest in enumerate(digests):
            await out.item(BlockHead(index), BLOCKS[digest])

    _patient(monkeypatch)
    asked = await house.rogue("a", in_order, group=True)
    reader = await house.reader("a")
    await reader.manifest(ROOT, ctx())
    asked.clear()
    assert same(await reader.tensors(ROOT, ctx()))
    assert len(asked) <= blocks_module.PARALLEL


async def test_a_version_that_no_commit_made_is_not_found_at_once(house: House) -> None:
    reader = await house.reader("a")
    with pytest.raises(NotFound, match="no version 777777"):
        await reader.manifest(b"w" * 32, ctx())


async def test_shards_spread_over_servers_are_put_together(house: House) -> None:
    even = frozenset(range(0, SHARDS, 2))
    shard_of = {block.digest: block.shard for block in MANIFEST.blocks()}
    for name, shards in (("a", even), ("b", ALL - even)):
        await house.server(name, {d: c for d, c in BLOCKS.items() if shard_of[d] in shards}, shards)
    assert same(await (await house.reader("a", "b")).tensors(ROOT, ctx()))


async def test_without_a_group_member_the_replicas_are_asked_by_name(house: House) -> None:
    await house.server("b")
    assert same(await (await house.reader("a", "b", "c")).tensors(ROOT, ctx()))


async def test_a_replica_that_has_only_a_part_gives_that_and_another_the_rest(house: House) -> None:
    half = dict(sorted(BLOCKS.items())[: len(BLOCKS) // 2])
    await house.server("a", half)
    await house.server("b", {d: c for d, c in BLOCKS.items() if d not in half})
    assert same(await (await house.reader("a", "b")).tensors(ROOT, ctx()))


async def corrupted(out: Any, digests: Sequence[bytes]) -> None:
    for index, digest in enumerate(digests):
        content = bytearray(BLOCKS[digest])
        content[-1] ^= 1
        await out.item(BlockHead(index), bytes(content))


async def zeros(out: Any, digests: Sequence[bytes]) -> None:
    for index, digest in enumerate(digests):
        await out.item(BlockHead(index), bytes(len(BLOCKS[digest])))


async def nothing(out: Any, digests: Sequence[bytes]) -> None:
    return


async def too_short(out: Any, digests: Sequence[bytes]) -> None:
    for index, digest in enumerate(digests):
        await out.item(BlockHead(index), BLOCKS[digest][:-1])


async def dies_in_the_middle(out: Any, digests: Sequence[bytes]) -> None:
    await out.item(BlockHead(0), BLOCKS[digests[0]])
    raise Unavailable("killed")


async def hangs_in_the_middle(out: Any, digests: Sequence[bytes]) -> None:
    await out.item(BlockHead(0), BLOCKS[digests[0]])
    await asyncio.Event().wait()


async def wrong_index(out: Any, digests: Sequence[bytes]) -> None:
    await out.item(BlockHead(len(digests)), BLOCKS[digests[0]])


async def twice(out: Any, digests: Sequence[bytes]) -> None:
    for _ in range(2):
        await out.item(BlockHead(0), BLOCKS[digests[0]])


@pytest.mark.parametrize(
    "behave", [corrupted, zeros, nothing, too_short, dies_in_the_middle, hangs_in_the_middle, wrong_index, twice]
)
async def test_a_bad_server_costs_time_but_never_a_wrong_byte(house: House, behave: Any) -> None:
    asked = await house.rogue("bad", behave, group=True)
    await house.server("good")
    reader = await house.reader("bad", "good")
    assert same(await reader.tensors(ROOT, ctx()))
    assert await reader.meta(ROOT, ctx()) == META
    assert asked


async def test_a_server_that_takes_requests_and_never_answers_is_asked_last(house: House) -> None:
    silent, asked = await house.bus(), []

    async def never(message: BlocksRequest, ctx: RequestContext) -> BlocksReply:
        asked.append(message)
        await asyncio.Event().wait()
        raise AssertionError

    await silent.serve(WEIGHT_BLOCKS_OF(model=MODEL, server="silent"), never)
    for shard in range(SHARDS):
        await silent.serve(WEIGHT_BLOCKS(model=MODEL, shard=str(shard)), never)
    await house.server("good")
    reader = await house.reader("silent", "good")
    manifest = await reader.manifest(ROOT, ctx())
    asked.clear()
    assert same(await reader.tensors(manifest.root, ctx()))
    assert len(asked) <= 2 * blocks_module.PARALLEL


async def test_with_only_bad_servers_the_reader_fails_and_says_why(house: House) -> None:
    await house.rogue("bad", zeros, group=True)
    for within_s in (1.0, 2.0, 4.0, 8.0, 16.0):  # a busy machine may take long until the first zeros are here
        with pytest.raises(DeadlineExceeded) as told:
            await (await house.reader("bad")).manifest(ROOT, ctx(within_s))
        if "not the one asked for" in told.value.message:
            return
    pytest.fail(told.value.message)


async def test_blocks_in_another_order_are_put_in_their_places(house: House) -> None:
    async def backwards(out: Any, digests: Sequence[bytes]) -> None:
        for index in reversed(range(len(digests))):
            await out.item(BlockHead(index), BLOCKS[digests[index]])

    await house.rogue("a", backwards)
    assert same(await (await house.reader("a")).tensors(ROOT, ctx()))


async def test_a_server_that_answers_late_in_its_life_is_waited_for(house: House) -> None:
    reader = await house.reader("a")
    reading = asyncio.create_task(reader.tensors(ROOT, ctx()))
    await asyncio.sleep(0)
    await house.server("a", shards=ALL)
    assert same(await reading)


async def test_nobody_there_ends_at_the_deadline(house: House) -> None:
    with pytest.raises(DeadlineExceeded, match="could not be fetched"):
        await (await house.reader("a")).manifest(ROOT, ctx(0.4))


async def test_a_malformed_manifest_is_corrupt_although_its_digest_fits(house: House) -> None:
    from pdbus.canonical import content_digest

    root = content_digest(b"not a manifest")
    await house.server("a", {root: b"not a manifest"}, ALL)
    reader = BlockReader(await house.bus(), MODEL, following(("a",), root))
    with pytest.raises(Corrupt):
        await reader.manifest(root, ctx())


async def test_only_the_tensors_that_are_named_travel(house: House) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    arrays = some_arrays(**{name: ARRAYS[name] * 2})
    manifest, blocks = manifest_and_blocks(arrays)
    await house.server("a", blocks, ALL)
    reader = BlockReader(await house.bus(), MODEL, following(("a",), manifest.root))
    moved: list[int] = []
    read = await reader.tensors(manifest.root, ctx(), [name], progress=lambda done, total: moved.append(total))
    assert same(read, {name: arrays[name]})
    assert moved[-1] == ARRAYS[name].nbytes


async def test_a_cancelled_read_leaves_no_stream_open(house: House) -> None:
    begun = asyncio.Event()

    async def hangs(out: Any, digests: Sequence[bytes]) -> None:
        begun.set()
        await asyncio.Event().wait()

    await house.rogue("a", hangs, group=True)
    bus = await house.bus()
    reading = asyncio.create_task(BlockReader(bus, MODEL, following(("a",), ROOT)).tensors(ROOT, ctx()))
    await begun.wait()
    assert bus.bulk.open_streams > 0
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert bus.bulk.open_streams == 0


async def test_a_server_whose_stream_broke_is_not_asked_first_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    _patient(monkeypatch)
    asked = await house.rogue("bad", corrupted, group=True)
    await house.server("good")
    await (await house.reader("bad", "good")).tensors(ROOT, ctx(), ["model.embed_tokens.weight"])
    shards = {b.shard for b in MANIFEST.blocks() if b.tensor == "model.embed_tokens.weight"}
    by_manifests, one_wave = 4, 2 * blocks_module.PARALLEL
    assert len(asked) <= by_manifests + one_wave < 2 * len(shards)
