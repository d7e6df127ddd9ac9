"""Latencies of an open loop of single reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from loadtest.arrivals import poisson
from loadtest.report import percentile
from pdbus.errors import PdbusError


@dataclass(frozen=True)
class Latencies:
    """Of reads, from the moment at which each was due."""

    reads: int
    failed: int
    p50_ms: float
    p99_ms: float
    per_s: float


async def open_loop(read: Callable[[int], Awaitable[bool]], rate: float, duration_s: float, seed: int = 0) -> Latencies:
    """Reads at the moments of a Poisson process, however slow earlier ones are. `read(number)`: did it succeed."""
    took: list[float] = []
    failed = 0
    begun = time.perf_counter()

    async def one(number: int, due_s: float) -> None:
        nonlocal failed
        await asyncio.sleep(begun + due_s - time.perf_counter())
        try:
            succeeded = await read(number)
        except PdbusError:
            succeeded = False
        took.append(time.perf_counter() - begun - due_s)
        failed += not succeeded

    async with asyncio.TaskGroup() as group:
        for number, due_s in enumerate(poisson(rate, duration_s, seed)):
            group.create_task(one(number, due_s))
    seconds = max(time.perf_counter() - begun, duration_s)
    return Latencies(len(took), failed, percentile(took, 50) * 1e3, percentile(took, 99) * 1e3, len(took) / seconds)
