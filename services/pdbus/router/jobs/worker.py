"""Working on queued jobs: each is taken, answered, its result stored, and only then its message removed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Generic, Self, TypeVar

from pdbus.bus.follower import Record
from pdbus.context import Deadline
from pdbus.errors import DeadlineExceeded, Overloaded, PdbusError, Unavailable
from pdbus.messages.jobs import JobEntry, JobSpec, JobStatus, JobWork
from pdbus.router.jobs.durable import Durable, Taken
from pdbus.router.jobs.execute import Asked, Executor, Outcome, Seen, failure
from pdbus.router.jobs.job_log import JobLog
from pdbus.router.jobs.progress import LOOK_AGAIN_S, Progress, wait_news
from pdbus.router.jobs.states import MOST_DELIVERIES, verdict
from pdbus.subjects import ToEvent
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)
_BACK_S = 1.0
"""A message that could not be worked on is given back after so long."""
Q = TypeVar("Q")
R = TypeVar("R")


class Takers(Generic[Q]):
    """So many tasks that each take one message of a queue after the other, while there is room."""

    def __init__(
        self,
        logs: Durable,
        to: ToEvent[Q],
        work: Callable[[Taken[Q]], Awaitable[None]],
        room: Callable[[], Awaitable[None]],
        count: int,
    ) -> None:
        self._logs, self._to, self._work, self._room, self._count = logs, to, work, room, count
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._busy: set[int] = set()
        self._stopping = False

    @property
    def busy(self) -> int:
        return len(self._busy)

    async def __aenter__(self) -> Self:
        self._tasks = {number: asyncio.create_task(self._take(number)) for number in range(self._count)}
        return self

    async def __aexit__(self, *_: object) -> None:
        """What is at work is given back to the queue."""
        await cancelled(*self._tasks.values())

    async def stop(self, *, at_work_too: bool = False) -> None:
        """Takes nothing more; what is at work goes on, or back to the queue at once."""
        self._stopping = True
        ending = [task for number, task in self._tasks.items() if at_work_too or number not in self._busy]
        await cancelled(*ending)

    async def drain(self, deadline: Deadline) -> None:
        """After `stop`: until nothing is at work, or the deadline passes."""
        if running := [task for task in self._tasks.values() if not task.done()]:
            await asyncio.wait(running, timeout=max(deadline.remaining_s, 0.0))

    async def _take(self, number: int) -> None:
        async with aclosing(self._logs.work(self._to)) as messages:
            while not self._stopping:
                await self._room()
                message = await anext(messages)
                self._busy.add(number)
                try:
                    await self._work(message)
                except Exception as error:
                    passing = isinstance(error, Unavailable | Overloaded)
                    log.warning("a message of %s goes back: %s", self._to.name, error, exc_info=not passing)
                    await asyncio.sleep(_BACK_S)
                finally:
                    self._busy.discard(number)


class JobWorker:
    """What is done with one message of the queue of jobs."""

    def __init__(self, jobs: JobLog, executor: Executor, progress: Progress) -> None:
        """`jobs`: by patient logs (durable.py)."""
        self._jobs, self._executor, self._progress = jobs, executor, progress

    async def work(self, message: Taken[JobWork]) -> None:
        """Returns once the job has its result and the message is gone. Left before, the message comes again."""
        spec = message.message.spec
        last = await self._jobs.accepted(spec, message.message.body)
        match verdict(spec, last.entry, message.deliveries, self._jobs.now()):
            case "drop":
                pass
            case "expired":
                await self._end(spec, _late(), last)
            case "given_up":
                reason = f"{MOST_DELIVERIES} routers ended while they worked on it"
                await self._end(spec, failure(PdbusError(reason)), last)
            case "run":
                await self._end(spec, await self._answered(spec, message.message.body) or _late(), last)
        await message.done()

    async def _answered(self, spec: JobSpec, body: bytes) -> Outcome | None:
        """None: it is late, or was cancelled, or has a result by now."""
        seen = Seen()
        asked = Asked(spec.tenant, spec.key_id, spec.endpoint, body, spec.id, spec.expires_s, spec.priority)
        with (
            self._progress.news(spec.tenant, spec.id, end_only=True) as news,
            self._progress.running(spec.tenant, spec.id, lambda: seen.tokens),
        ):
            await self._progress.tell(spec.tenant, spec.id, "running")
            return await unless(self._executor.run(asked, seen), news, lambda: self._over(spec, seen))

    async def _over(self, spec: JobSpec, seen: Seen) -> bool:
        if seen.answer is None and self._jobs.now() >= spec.expires_s:
            return True
        last = await self._jobs.last(spec.tenant, spec.id)
        return last is not None and last.final

    async def _end(self, spec: JobSpec, outcome: Outcome, last: Record[JobEntry]) -> None:
        """Stores the result, unless it has one."""
        status: JobStatus = "completed" if outcome.status_code == 200 else "failed"
        entry = await self._jobs.end(spec, status, outcome.status_code, outcome.data, tokens=outcome.tokens, last=last)
        await self._progress.tell(spec.tenant, spec.id, entry.status)


async def unless(
    work: Coroutine[Any, Any, R],
    news: asyncio.Event,
    over: Callable[[], Awaitable[bool]],
    look_again_s: float = LOOK_AGAIN_S,
) -> R | None:
    """What `work` returns; None where `over()` turns true first, asked at each news and now and then."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_until(news, over, look_again_s))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watch.result()  # what failed in it is no end of the work
        return None
    finally:
        await cancelled(watch, task)


def _late() -> Outcome:
    return failure(DeadlineExceeded("there was no room for it within a day"))


async def _until(news: asyncio.Event, over: Callable[[], Awaitable[bool]], look_again_s: float) -> None:
    while True:
        await wait_news(news, look_again_s)
        with suppress(PdbusError):
            if await over():
                return
