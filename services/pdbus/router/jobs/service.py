"""The jobs of a router: how their parts hang together, begin and end."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Self

from pdbus.bus.bus import Bus
from pdbus.context import Deadline
from pdbus.router.embeddings import Embeddings
from pdbus.router.frontend import Frontend
from pdbus.router.identity import Identities
from pdbus.router.jobs.execute import Executor
from pdbus.router.jobs.handlers import JobHandlers
from pdbus.router.jobs.job_log import JobLog
from pdbus.router.jobs.progress import Progress
from pdbus.router.jobs.room import JobRoom
from pdbus.router.jobs.told import Jobs
from pdbus.router.jobs.worker import JobWorker, Takers
from pdbus.router.quotas import Quotas
from pdbus.subjects import JOBS

_AT_ONCE = 16
"""Jobs that one router takes from the queue at once; how many of them run, the room says."""


class JobService:
    """Takes jobs from the queue and serves whoever asks for them, while it is entered. Needs a bus with logs."""

    def __init__(
        self, bus: Bus, frontend: Frontend, embeddings: Embeddings, identities: Identities, quotas: Quotas, slots: int
    ) -> None:
        """`slots`: of the router's admission."""
        model = frontend.models.model
        self._bus, self._model = bus, model
        room = JobRoom(frontend.admission, slots)
        executor = Executor(frontend, embeddings, identities, room)
        jobs = JobLog(bus.logs, model)
        self._progress = Progress(bus)
        self.jobs = Jobs(jobs, executor, self._progress, quotas)
        self._handlers = JobHandlers(self.jobs, identities)
        worker = JobWorker(jobs, executor, self._progress)
        self._takers = Takers(bus.logs, JOBS(model=model), worker.work, room.free, _AT_ONCE)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._progress)
            self._served = await self._handlers.serve(self._bus, self._model, stack)
            await stack.enter_async_context(self._takers)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def busy(self) -> int:
        """Messages that are at work."""
        return self._takers.busy

    async def stop_intake(self) -> None:
        for registration in self._served:
            await registration.stop()
        await self._takers.stop()

    async def drain(self, deadline: Deadline) -> None:
        """After `stop_intake`: what is at work ends, or goes back to the queue when the deadline passes."""
        await self._takers.drain(deadline)
