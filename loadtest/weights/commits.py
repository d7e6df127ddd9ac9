"""Commits at a steady pace beside a load, and when each of them was visible."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from loadtest.weights.changes import Change
from pdbus.client.weights import Weights
from pdbus.context import Deadline
from pdbus.errors import DeadlineExceeded
from pdbus.messages.common import Digest
from pdbus.tasks import cancelled

STABLE = "stable"


@dataclass
class Told:
    """Moments on the wall clock, in ns."""

    committed: list[tuple[Digest, int]] = field(default_factory=list)
    """Each root, and when the log took it."""
    visible: dict[Digest, int] = field(default_factory=dict)
    """When its ref named it. A head that the next one followed before that is never visible."""
    staged_s: list[float] = field(default_factory=list)
    """From the beginning of each update to its commit."""
    sent_bytes: int = 0
    due: int = 0
    """Commits that the pace asked for."""

    @property
    def waits_s(self) -> list[float]:
        """From commits to their refs."""
        return [(self.visible[root] - at) / 1e9 for root, at in self.committed if root in self.visible]


async def commit(weights: Weights, change: Change, told: Told) -> Digest:
    """Raises what an update does."""
    began = time.perf_counter()
    async with weights.begin(message="a measurement") as update:
        await change(update)
        done = await update.commit()
    told.staged_s.append(time.perf_counter() - began)
    told.sent_bytes += done.sent_bytes
    version = (await weights.history()).roots[done.root]
    told.committed.append((done.root, version.at.time_ns))
    return done.root


@asynccontextmanager
async def beside(weights: Weights, make: Callable[[], Change], every_s: float) -> AsyncIterator[Told]:
    """Commits on and on while the scope lasts, one after another, each when it is due or as soon as the one before is
    made. Raises what an update does, from the scope's end."""
    told = Told()
    watching: set[asyncio.Task[None]] = set()

    async def watch(root: Digest) -> None:
        try:
            if await weights.wait_for_ref(STABLE, root, 60.0):
                told.visible[root] = time.time_ns()
        except DeadlineExceeded:
            return  # it is missing among the visible ones

    async def run() -> None:
        start = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, start + told.due * every_s - time.monotonic()))
            told.due += 1
            root = await commit(weights, make(), told)
            watching.add(asyncio.create_task(watch(root)))

    running = asyncio.create_task(run())
    try:
        yield told
    finally:
        if not running.done():
            await cancelled(running)
        await settled(weights)
        await cancelled(*watching)
    if not running.cancelled():
        running.result()


async def settled(weights: Weights, timeout_s: float = 60.0) -> Digest:
    """Waits until the ref names its line's head; returns that. Raises DeadlineExceeded."""
    deadline = Deadline.after(timeout_s)
    while True:
        history = await weights.history()
        head = history.head(STABLE)
        if head is not None and await weights.wait_for_ref(STABLE, head, deadline.remaining_s):
            return head
