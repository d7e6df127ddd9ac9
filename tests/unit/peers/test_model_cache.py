"""A worker fetches what this host has not had before, once, and nothing that it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.context import RequestContext
from pdbus.param_server.serving import BlockServer
from pdbus.param_server.store import BlockStore
from pdbus.peers.model_cache import ModelCache
from pdbus.peers.weights import BlockReader
from pdbus.weights.blocks import SHARDS, Run, rows_per_block
from tests.support.weights import following, manifest_and_blocks, some_arrays

MODEL = "m"
EMBEDDING, Q = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"
OLD = some_arrays()
NEW = some_arrays(**{EMBEDDING: OLD[EMBEDDING].copy()})
NEW[EMBEDDING][5] += 1
NEW[EMBEDDING][700] += 1
(OLD_MANIFEST, OLD_BLOCKS), (NEW_MANIFEST, NEW_BLOCKS) = manifest_and_blocks(OLD), manifest_and_blocks(NEW)


class Rig:
    def __init__(self, life: AsyncExitStack, folder: Path) -> None:
        self.broker, self._life, self.folder = MemoryBroker(), life, folder
        self.asked: list[bytes] = []

    async def start(self) -> None:
        store = self._life.enter_context(BlockStore(self.folder / "server", MODEL))
        with store.writing() as pack:
            for digest, content in (OLD_BLOCKS | NEW_BLOCKS).items():
                pack.add(digest, memoryview(content))
        read = store.read

        def noting(digest: bytes) -> Any:
            self.asked.append(digest)
            return read(digest)

        store.read = noting  # type: ignore[method-assign]
        bus = await self._life.enter_async_context(memory_bus(self.broker))
        server = await self._life.enter_async_context(BlockServer(bus, MODEL, "a", store))
        await server.join(frozenset(range(SHARDS)))

    async def reader(self, cache: str | None = "cache", budget: int = 1 << 30) -> tuple[BlockReader, ModelCache]:
        bus = await self._life.enter_async_context(memory_bus(self.broker))
        opened = ModelCache.open(self.folder / cache if cache else None, budget)
        follower = following(("a",), OLD_MANIFEST.root, NEW_MANIFEST.root)
        return BlockReader(bus, MODEL, follower, opened), opened


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as life:
        made = Rig(life, tmp_path)
        await made.start()
        yield made


def ctx() -> RequestContext:
    return RequestContext.after(30)


def same(ours: Any, theirs: Any) -> bool:
    return all(np.array_equal(ours[name], array) for name, array in theirs.items())


async def test_of_a_newer_version_only_what_differs_travels(rig: Rig) -> None:
    reader, cache = await rig.reader()
    assert same(await reader.tensors(OLD_MANIFEST.root, ctx()), OLD)
    rig.asked.clear()
    assert same(await reader.tensors(NEW_MANIFEST.root, ctx()), NEW)
    changed = set(NEW_MANIFEST.tensors[EMBEDDING].blocks) - set(OLD_MANIFEST.tensors[EMBEDDING].blocks)
    layer = next(layer.digest for layer in NEW_MANIFEST.layers if layer.name == "embed")
    assert len(changed) == 2
    assert sorted(rig.asked) == sorted([*changed, layer, NEW_MANIFEST.root])
    blocks = len({digest for tensor in OLD_MANIFEST.tensors.values() for digest in tensor.blocks})
    assert cache.counts["miss"] <= blocks + 2


async def test_another_process_of_the_host_finds_it_and_a_restarted_one_too(rig: Rig) -> None:
    reader, _ = await rig.reader()
    await reader.tensors(OLD_MANIFEST.root, ctx())
    other, cache = await rig.reader()
    await other.manifest(OLD_MANIFEST.root, ctx())
    rig.asked.clear()
    assert same(await other.tensors(OLD_MANIFEST.root, ctx()), OLD)
    assert rig.asked == []
    assert (cache.counts["miss"], cache.counts["hit"] > 0) == (0, True)


async def test_runs_of_rows_come_in_one_go(rig: Rig) -> None:
    reader, _ = await rig.reader()
    step = rows_per_block(OLD[EMBEDDING].shape, "fp32")
    wanted = [Run(EMBEDDING, slice(step, 3 * step)), Run(Q, slice(0, step))]
    first, second = await reader.runs(OLD_MANIFEST.root, ctx(), wanted)
    assert np.array_equal(first, OLD[EMBEDDING][step : 3 * step])
    assert np.array_equal(second, OLD[Q][:step])


async def test_a_damaged_block_is_fetched_again(rig: Rig) -> None:
    reader, _ = await rig.reader()
    await reader.tensors(OLD_MANIFEST.root, ctx())
    digest = OLD_MANIFEST.tensors[Q].blocks[0]
    (file,) = rig.folder.glob(f"cache/blocks/*/{digest.hex()}")
    damaged = bytearray(file.read_bytes())
    damaged[100] ^= 1
    file.write_bytes(damaged)
    rig.asked.clear()
    assert same(await reader.tensors(OLD_MANIFEST.root, ctx()), OLD)
    assert rig.asked == [digest]
    assert file.read_bytes() == OLD_BLOCKS[digest]


async def test_two_that_want_the_same_fetch_it_once(rig: Rig) -> None:
    readers = [(await rig.reader())[0] for _ in range(3)]
    for reader in readers:
        await reader.manifest(OLD_MANIFEST.root, ctx())
    rig.asked.clear()
    read = await asyncio.gather(*(reader.tensors(OLD_MANIFEST.root, ctx(), [EMBEDDING]) for reader in readers))
    assert all(np.array_equal(one[EMBEDDING], OLD[EMBEDDING]) for one in read)
    assert len(rig.asked) == len(set(rig.asked)) == len(OLD_MANIFEST.tensors[EMBEDDING].blocks)


@pytest.mark.parametrize(("cache", "budget"), [(None, 1), ("cache", 0), ("server/lock/no", 1), ("cache", 10)])
async def test_without_a_usable_folder_everything_is_fetched(rig: Rig, cache: str | None, budget: int) -> None:
    (rig.folder / "server" / "lock").touch()
    reader, opened = await rig.reader(cache, budget)
    for _ in range(2):
        assert same(await reader.tensors(OLD_MANIFEST.root, ctx()), OLD)
    assert opened.counts["hit"] == 0
