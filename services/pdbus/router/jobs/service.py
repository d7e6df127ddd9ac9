"""The jobs of a router: how their parts hang together, begin and end."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Self

from aiohttp import web

from pdbus.bus.bus import Bus
from pdbus.context import Deadline
from pdbus.errors import PdbusError
from pdbus.router.embeddings import Embeddings
from pdbus.router.frontend import Frontend
from pdbus.router.identity import Identities
from pdbus.router.jobs.batch_log import BatchLog
from pdbus.router.jobs.batch_run import BatchWorker
from pdbus.router.jobs.batches import Batches
from pdbus.router.jobs.durable import Patient
from pdbus.router.jobs.execute import Executor
from pdbus.router.jobs.files import FileStore
from pdbus.router.jobs.handlers import JobHandlers
from pdbus.router.jobs.http_files import HttpFiles
from pdbus.router.jobs.http_jobs import HttpJobs
from pdbus.router.jobs.job_log import JobLog
from pdbus.router.jobs.progress import Progress
from pdbus.router.jobs.room import JobRoom
from pdbus.router.jobs.share_follower import ShareFollower
from pdbus.router.jobs.shares import Shares
from pdbus.router.jobs.told import Jobs
from pdbus.router.jobs.worker import JobWorker, Takers
from pdbus.router.quotas import Quotas
from pdbus.router.settings import RouterSettings
from pdbus.subjects import BATCH_JOBS, JOBS
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)

_AT_ONCE = 16
"""Jobs that one router takes from the queue at once; how many of them run, the room says."""
_BATCHES_AT_ONCE = 4


class JobService:
    """Takes jobs from the queue and serves whoever asks for them, while it is entered. Needs a bus with logs."""

    def __init__(
        self,
        bus: Bus,
        frontend: Frontend,
        embeddings: Embeddings,
        identities: Identities,
        quotas: Quotas,
        settings: RouterSettings,
    ) -> None:
        model = frontend.models.model
        self._bus, self._model = bus, model
        self._room = room = JobRoom(frontend.admission, settings.max_inflight)
        self._streams = asyncio.Event()
        """The streams are there: a router starts, and serves, before that."""
        self.executor = executor = Executor(frontend, embeddings, identities, room)
        self.shares = shares = Shares(settings.tenant_disk_bytes)
        patient = Patient(bus.logs)
        self._sizes = ShareFollower(bus.logs, shares, self._streams)
        self._progress = Progress(bus)
        jobs = JobLog(bus.logs, model, shares)
        self.jobs = Jobs(jobs, executor, self._progress, quotas)
        self._handlers = JobHandlers(self.jobs, identities)
        worker = JobWorker(jobs.patient(), executor, self._progress)
        self._takers = Takers(bus.logs, JOBS(model=model), worker.work, self._free, _AT_ONCE)
        batch_worker = BatchWorker(
            BatchLog(patient, model, shares), FileStore(patient, shares), executor, self._progress, shares
        )
        self._batch_takers = Takers(bus.logs, BATCH_JOBS(model=model), batch_worker.work, self._free, _BATCHES_AT_ONCE)
        self.batches = Batches(
            BatchLog(bus.logs, model, shares), FileStore(bus.logs, shares), self._progress, quotas, shares
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._progress)
            self._served = await self._handlers.serve(self._bus, self._model, stack)
            stack.push_async_callback(cancelled, asyncio.create_task(self._ensure()))
            await stack.enter_async_context(self._sizes)
            await stack.enter_async_context(self._takers)
            await stack.enter_async_context(self._batch_takers)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _ensure(self) -> None:
        while not self._streams.is_set():
            try:
                await self._bus.logs.ensure()
                self._streams.set()
            except PdbusError as error:  # after a minute
                log.warning("no job is taken before the streams are there: %s", error.message)

    async def _free(self) -> None:
        await self._streams.wait()
        await self._room.free()

    def routes(self) -> list[web.RouteDef]:
        """Of jobs, batches and files over HTTP."""
        return [*HttpJobs(self.jobs, self.batches).routes(), *HttpFiles(self.batches).routes()]

    @property
    def busy(self) -> int:
        """Messages that are at work."""
        return self._takers.busy + self._batch_takers.busy

    async def stop_intake(self) -> None:
        for registration in self._served:
            await registration.stop()
        await self._takers.stop()
        await self._batch_takers.stop(at_work_too=True)  # a batch may go on for a day: elsewhere, line by line

    async def drain(self, deadline: Deadline) -> None:
        """After `stop_intake`: what is at work ends, or goes back to the queue when the deadline passes."""
        await self._takers.drain(deadline)
