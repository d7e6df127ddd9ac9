"""Real param-servers under load. Where a second one has no core of its own, `simulated` shows what it would add."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.param_servers.figures import Latencies, open_loop
from loadtest.param_servers.rig import Rig, param_servers, reading
from pdbus.client.weights import Weights
from pdbus.context import Deadline, RequestContext
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader

_MODEL, _COLD = "hot", "cold"
_MADE_S = 300.0


@dataclass(frozen=True)
class Start:
    """What a worker that starts has to fetch, and how long that takes."""

    fp32_bytes: int
    int8_bytes: int
    fp32_s: float
    int8_s: float
    convert_s: float
    """Making the version in int8, once, at the param-servers."""


async def block_fetches(
    servers: int = 2, rate: float = 50.0, duration_s: float = 5.0, bulk_readers: int = 0
) -> Latencies:
    """Single blocks of 256 KiB, at random, in an open loop; beside `bulk_readers` that read a matrix all the time."""
    async with param_servers([[_MODEL]] * servers) as rig, _reader(rig, _MODEL) as (reader, root):
        ctx = RequestContext.after(60)
        tensors = [t for t in (await reader.manifest(root, ctx)).tensors.values() if len(t.blocks) > 8]
        draw = random.Random(0)

        async def fetch(number: int) -> bool:
            tensor = draw.choice(tensors)
            index = draw.randrange(len(tensor.blocks))
            return index in await reader.blocks(tensor, [index], RequestContext.after(10))

        await fetch(0)
        async with asyncio.TaskGroup() as group:
            if bulk_readers:
                group.create_task(reading(rig, _MODEL, bulk_readers, duration_s))
            return await open_loop(fetch, rate, duration_s)


async def hot_matrix(servers: int, readers: int = 4, duration_s: float = 4.0) -> float:
    """Bytes a second of one matrix of 64 blocks, read by so many readers at once."""
    async with param_servers([[_MODEL]] * servers) as rig:
        return await reading(rig, _MODEL, readers, duration_s)


async def hot_model(own_group: bool, readers: int = 4, duration_s: float = 4.0) -> float:
    """Bytes a second of the hot model while another one is read as much: from a process that serves both, or each from
    a process of its own."""
    async with param_servers([[_MODEL], [_COLD]] if own_group else [[_MODEL, _COLD]]) as rig:
        hot, _ = await asyncio.gather(*(reading(rig, model, readers, duration_s) for model in (_MODEL, _COLD)))
        return hot


async def start_in_int8(checkpoint: Path) -> Start:
    """All blocks that a worker in int8 fetches at its start: of the version in fp32, and of the one made of it."""
    async with param_servers([[_MODEL]], checkpoint) as rig, _reader(rig, _MODEL) as (reader, root):
        weights = Weights(rig.bus, _MODEL)
        try:
            begun = time.perf_counter()
            await weights.convert("stable", "int8")
            made = await weights.converted(root, "int8", _MADE_S)
            convert_s = time.perf_counter() - begun
        finally:
            await weights.close()
        fp32, int8 = await _all_of(reader, root), await _all_of(reader, made)
        return Start(fp32[0], int8[0], fp32[1], int8[1], convert_s)


async def _all_of(reader: BlockReader, root: bytes) -> tuple[int, float]:
    """(bytes, seconds) of all weights, tensor by tensor."""
    ctx = RequestContext.after(_MADE_S)
    manifest = await reader.manifest(root, ctx)
    names = [name for name in manifest.tensors if not name.startswith("meta/")]
    begun = time.perf_counter()
    for name in names:
        await reader.stored(root, ctx, [name])
    return sum(manifest.tensors[name].nbytes for name in names), time.perf_counter() - begun


@asynccontextmanager
async def _reader(rig: Rig, model: str) -> AsyncIterator[tuple[BlockReader, bytes]]:
    """A reader that knows the log, and the newest version."""
    async with AsyncExitStack() as life:
        follower = await life.enter_async_context(HistoryFollower(rig.bus, model))
        root = await follower.wait_for(lambda history: history.head("stable") or b"", Deadline.after(10))
        yield BlockReader(rig.bus, model, follower), root
