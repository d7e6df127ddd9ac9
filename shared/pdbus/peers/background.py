"""Work beside the requests that caused it: bounded in number and bytes, owned, never awaited by a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pdbus.context import Deadline
from pdbus.errors import PdbusError
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)


class Background:
    """At most `at_once` run, at most `waiting` and `waiting_bytes` are held in all; more is not begun."""

    def __init__(self, at_once: int, waiting: int, waiting_bytes: int) -> None:
        self._running = asyncio.Semaphore(at_once)
        self._waiting = waiting
        self._waiting_bytes = waiting_bytes
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, size: int, work: Callable[[], Awaitable[None]]) -> bool:
        """Runs `work()`, which holds `size` bytes; what it raises goes to the log only. False: too much is held."""
        if len(self._tasks) >= self._waiting or self._bytes + size > self._waiting_bytes:
            return False
        self._bytes += size
        task = asyncio.create_task(self._run(work))
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._bytes -= size

        task.add_done_callback(done)
        return True

    async def drain(self, deadline: Deadline) -> None:
        """Returns when all is done, or the deadline passes."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(deadline.remaining_s, 0.0))

    async def close(self) -> None:
        await cancelled(*self._tasks)

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        async with self._running:
            try:
                await work()
            except PdbusError as error:
                log.debug("work in the background was given up: %s", error.message)
            except Exception:
                log.exception("work in the background failed")
