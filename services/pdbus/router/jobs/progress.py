"""How far jobs are, by the events of all routers. What was lost, or came to a router that is gone, the log tells."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Self

from pdbus.bus.bus import Bus
from pdbus.messages.jobs import JobProgress
from pdbus.subjects import ANY, JOB_PROGRESS
from pdbus.tasks import cancelled

LOOK_AGAIN_S = 3.0
"""Whoever waits for a job reads the log at least so often: an event may be lost."""
TELL_EVERY_S = 0.5
_GOING_ON = frozenset({"queued", "running"})
_REMEMBERED = 16_384


class Progress:
    """Tells and hears; tells again of what runs here every `TELL_EVERY_S`. Used from one event loop."""

    def __init__(self, bus: Bus, now: Callable[[], float] = time.monotonic) -> None:
        self._bus, self._now = bus, now
        self._known: OrderedDict[tuple[str, str], tuple[JobProgress, float]] = OrderedDict()
        """What was heard last of a job, and when."""
        self._news: dict[tuple[str, str], dict[asyncio.Event, bool]] = {}
        """Who waits for news of a job, and whether only for its end."""
        self._running: dict[tuple[str, str], Callable[[], int]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        registration = await self._bus.subscribe(JOB_PROGRESS(tenant=ANY, job=ANY), self._hear)
        await self._stack.enter_async_context(registration)
        task = asyncio.create_task(self._tell_again())
        self._stack.push_async_callback(cancelled, task)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def tell(self, tenant: str, job: str, status: str, tokens: int = 0) -> None:
        told = JobProgress(tenant, job, status, tokens)
        self._hear(told)
        await self._bus.publish(JOB_PROGRESS(tenant=tenant, job=job), told)

    def heard(self, tenant: str, job: str) -> bool:
        """Whether anything was ever told of it."""
        return (tenant, job) in self._known

    def at_work(self, tenant: str, job: str) -> int | None:
        """How many tokens of it there are; None where it does not run, or whoever ran it has fallen silent."""
        told, at_s = self._known.get((tenant, job), (None, 0.0))
        if told is None or told.status != "running" or self._now() - at_s > LOOK_AGAIN_S:
            return None
        return told.tokens

    @contextmanager
    def news(self, tenant: str, job: str, *, end_only: bool = False) -> Iterator[asyncio.Event]:
        """Set whenever something is heard of the job; `end_only`: that it has ended, or is to."""
        event, waiting = asyncio.Event(), self._news.setdefault((tenant, job), {})
        waiting[event] = end_only
        try:
            yield event
        finally:
            del waiting[event]
            if not waiting and self._news.get((tenant, job)) is waiting:
                del self._news[tenant, job]

    @contextmanager
    def running(self, tenant: str, job: str, tokens: Callable[[], int]) -> Iterator[None]:
        """Told of while the scope lasts."""
        self._running[tenant, job] = tokens
        try:
            yield
        finally:
            self._running.pop((tenant, job), None)

    def _hear(self, told: JobProgress) -> None:
        name = told.tenant, told.job
        self._known[name] = told, self._now()
        self._known.move_to_end(name)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        for event, end_only in self._news.get(name, {}).items():
            if not (end_only and told.status in _GOING_ON):
                event.set()

    async def _tell_again(self) -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            for (tenant, job), tokens in list(self._running.items()):
                await self.tell(tenant, job, "running", tokens())


async def wait_news(event: asyncio.Event, seconds: float) -> None:
    """Until something is heard, or so long."""
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            await event.wait()
    except TimeoutError:
        return
    event.clear()
