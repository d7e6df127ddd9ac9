"""Writers of weights, measured against param-servers that run: updates of several parts, and a staging branch."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np

from pdbus.bus.bus import connect
from pdbus.client.weights import Seal, Weights
from pdbus.context import new_id


@asynccontextmanager
async def writers(nats_url: str, model: str, count: int) -> AsyncIterator[list[Weights]]:
    """Each with connections of its own, as processes have."""
    async with AsyncExitStack() as life:
        found: list[Weights] = []
        for number in range(count):
            bus = await life.enter_async_context(connect(nats_url, name=f"writer-{number}"))
            found.append(Weights(bus, model))
            life.push_async_callback(found[-1].close)
            await found[-1].history()
        yield found


async def shared_pushes(nats_url: str, model: str, tensors: Sequence[str], *, steps: int = 5) -> float:
    """Median seconds of an update in which part i changes one row of `tensors[i]`, from begin to the last answer."""
    async with writers(nats_url, model, len(tensors)) as parts:

        async def push(part: int, tx: str, step: int) -> None:
            async with parts[part].begin(tx=tx, part=(part, len(tensors)), message=tx) as update:
                width = update.tensor(tensors[part]).shape[1:]
                await update.stage_rows(tensors[part], [0], np.full((1, *width), step, np.float32))
                await update.commit()

        took: list[float] = []
        for step in range(steps + 1):
            started, tx = time.monotonic(), new_id()
            await asyncio.gather(*(push(part, tx, step) for part in range(len(tensors))))
            took.append(time.monotonic() - started)
        return statistics.median(took[1:])


async def branch_pushes(
    nats_url: str, model: str, tensor: str, *, count: int = 4, seconds: float = 5.0
) -> tuple[float, float, Seal]:
    """(pushes a second of `count` writers that each add a row at a time, seconds of the seal, what it made)."""
    async with writers(nats_url, model, count) as found:
        manifest = await found[0].manifest((await found[0].history()).heads["stable"])
        shape = manifest.tensor(tensor).shape
        rng = np.random.default_rng(0)
        until, name, pushes = time.monotonic() + seconds, f"load-{new_id()[:8]}", 0

        async def write(weights: Weights) -> None:
            nonlocal pushes
            branch = weights.branch(name)
            while time.monotonic() < until:
                await branch.add(tensor, np.ones((1, *shape[1:]), np.float32), rows=[int(rng.integers(shape[0]))])
                pushes += 1

        await asyncio.gather(*map(write, found))
        started = time.monotonic()
        seal = await found[0].branch(name).seal()
        return pushes / seconds, time.monotonic() - started, seal
