"""What prefill and decode workers share: admission and end of jobs, items to routers, cancel, and watching peers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from opentelemetry.util.types import AttributeValue

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.bus.serving import Registration
from pdbus.context import RequestContext
from pdbus.engine.absence import Absence
from pdbus.engine.attempts import Attempts
from pdbus.engine.core import Core
from pdbus.engine.emitter import Emitter
from pdbus.engine.job import Job, internal
from pdbus.engine.scheduler import Limits
from pdbus.engine.sequence import Event, Key
from pdbus.engine.tickets import is_name
from pdbus.engine.versions import Versions
from pdbus.errors import Overloaded, PdbusError, Unavailable
from pdbus.kv.pool import KvPool
from pdbus.messages.presence import Load
from pdbus.messages.router import TokenItem
from pdbus.messages.workers import Accepted, Cancel, Resend, ResendReply
from pdbus.subjects import CANCEL, To
from pdbus.telemetry import WorkerMetrics, tracer

log = logging.getLogger(__name__)

J = TypeVar("J", bound=Job)

LOAD_S = 3.0
"""How long a request waits for a version that is not loaded, before it is sent elsewhere."""
_TICK_S = 0.25
_ROUTER_GONE_S = 2.0
"""After the first second without a card, by which a peer stops being live: so 3 s in all."""
_WORKER_GONE_S = 1.0


class Worker(ABC, Generic[J]):
    """Between the bus and one engine. Entered, it serves; leaving ends every job, and with it all that jobs hold."""

    service: ClassVar[str]

    def __init__(
        self,
        bus: Bus,
        id: str,
        model: str,
        versions: Versions,
        fleet: Fleet,
        pool: KvPool,
        limits: Limits,
        most_jobs: int,
    ) -> None:
        self.bus, self.id, self.model, self.versions, self.fleet, self.pool = bus, id, model, versions, fleet, pool
        self.limits = limits
        self.attempts = Attempts()
        self.emitter = Emitter(bus, id)
        self.metrics = WorkerMetrics(model)
        self.jobs: dict[Key, J] = {}
        self.failed = asyncio.get_running_loop().create_future()
        """Ends with an error if the engine dies."""
        self.core = Core(pool, limits, self._on_events, self._on_failure)
        self._most_jobs = most_jobs
        self._tasks: set[asyncio.Task[None]] = set()
        self._registrations: list[Registration[Any, Any]] = []
        self._routers, self._workers = Absence(_ROUTER_GONE_S), Absence(_WORKER_GONE_S)

    async def prepare(self, stack: contextlib.AsyncExitStack) -> None:
        """Enters what has to live longer than any job. Nothing, unless a worker says otherwise."""

    @property
    @abstractmethod
    def resend_to(self) -> To[Resend, ResendReply]:
        """Where routers ask for what they missed: also while the worker drains."""

    @abstractmethod
    async def serve(self) -> list[Registration[Any, Any]]:
        """Registers the subjects by which new work comes."""

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.core)
            await stack.enter_async_context(self.emitter)
            stack.push_async_callback(self._end_tasks)
            self.spawn(self._watch())
            await self.prepare(stack)
            stack.push_async_callback(self._end_jobs)
            await stack.enter_async_context(await self.bus.subscribe(CANCEL(), self._on_cancel))
            await stack.enter_async_context(await self.bus.serve(self.resend_to, self.resend))
            stack.push_async_callback(self.stop_intake)
            self._registrations = await self.serve()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def stop_intake(self) -> None:
        """Callers of a subject that nobody serves are told at once, and go elsewhere."""
        registrations, self._registrations = self._registrations, []
        for registration in registrations:
            await registration.close()

    async def drain(self) -> None:
        """Returns when no job is left. Bounded by the caller."""
        while self.jobs:
            await asyncio.wait([job.task for job in self.jobs.values()])

    def load(self) -> Load:
        return Load(
            running=self.core.running,
            waiting=max(len(self.jobs) - self.core.running, 0),
            pages_total=self.core.pages.total,
            pages_used=self.core.pages.used,
            streams=self.bus.bulk.open_streams,
            bytes_used=self.core.pages.used * self.pool.format.page_bytes,
            bytes_total=self.core.pages.total * self.pool.format.page_bytes,
        )

    # Jobs

    def admit(self, request_id: str, choice: int, attempt: int) -> bool:
        """True: the attempt is new here, and there is room. False: it was taken already. Raises why it is refused."""
        session = f"{request_id}-{choice}"
        if not self.attempts.admit(request_id, choice, session, attempt, time.monotonic()):
            return False
        if len(self.jobs) >= self._most_jobs:
            self.attempts.forget(session, attempt)
            raise Overloaded(f"{len(self.jobs)} requests are at work or waiting here", retry_after_s=1.0)
        return True

    def start(self, job: J) -> None:
        """Runs an admitted job. An older attempt of its session ends: its router has given it up."""
        for other in self.jobs.values():
            if other.session == job.session:
                other.task.cancel()
        self.jobs[job.key] = job
        job.task = self.spawn(self._live(job))

    def accepted(self) -> Accepted:
        return Accepted(self.id, self.bus.incarnation, self.core.waiting)

    def send(self, job: Job, item: TokenItem) -> None:
        """Puts a job's next item on its way; those of one turn of the event loop share a frame."""
        job.next_index = item.index + len(item.ids)
        job.finished = job.finished or item.finish is not None
        self.emitter.put(job.router, item)

    async def resend(self, message: Resend, ctx: RequestContext) -> ResendReply:
        reply = self.emitter.outbox.resend(message)
        running = (f"{message.request_id}-{message.choice}", message.attempt) in self.jobs
        return ResendReply("running") if reply.state == "unknown" and running else reply

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """A task that this worker owns."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _live(self, job: Job) -> None:
        attributes: dict[str, AttributeValue] = {
            "pdbus.request_id": job.request_id,
            "pdbus.choice": job.choice,
            "pdbus.attempt": job.attempt,
        }
        error: PdbusError | None = None
        try:
            with tracer().start_as_current_span(self.service, attributes=attributes):
                await job.run()
        except asyncio.CancelledError:
            error = job.failure
            if error is None:
                raise
        except PdbusError as failure:
            error = failure
        except Exception as failure:
            log.exception("attempt %s failed", job.key)
            error = internal(failure)
        finally:
            del self.jobs[job.key]
            self.emitter.outbox.close(job.request_id, job.choice, job.attempt, time.monotonic())
            self.metrics.finished((time.time_ns() - job.accepted_ns) / 1e9, error.code if error else None)
        if error is not None:
            await self._report(job, error)

    async def _report(self, job: Job, error: PdbusError) -> None:
        """Tells the router and the other leg, which must not wait for this one."""
        log.info("attempt %s failed: %s", job.key, error)
        self.attempts.fail(job.session, job.attempt, error)
        if not job.finished:
            self.send(job, job.item(finish="error", error=error))
            cancel = Cancel(job.request_id, job.attempt, job.router, (), job.choice, "peer_failed")
            await self.bus.publish(CANCEL(), cancel)

    # Cancel, and peers that are gone

    def _on_cancel(self, message: Cancel) -> None:
        self.attempts.cancel(message, time.monotonic())
        if self.id in message.holders:  # from the router; what a worker tells another says nothing of our items
            self.emitter.outbox.acknowledge(message)
        jobs: list[Job] = [
            job
            for job in self.jobs.values()
            if job.request_id == message.request_id
            and job.attempt <= message.attempt
            and message.choice in (None, job.choice)
        ]
        self.spawn(self._free(message, jobs))

    async def _free(self, message: Cancel, jobs: list[Job]) -> None:
        """Ends the jobs, and answers once all that they held is free."""
        for job in jobs:
            job.task.cancel()
        if jobs:
            await asyncio.wait([job.task for job in jobs])
        if message.reason == "finished" or self.id not in message.holders or not is_name(message.router):
            return
        choices = {job.choice for job in jobs} | ({message.choice} if message.choice is not None else set())
        for choice in choices or {0}:
            item = TokenItem(message.request_id, choice, message.attempt, b"", -1, (), finish="cancelled")
            self.emitter.put(message.router, item)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            self.emitter.outbox.expire(now_s)
            jobs = list(self.jobs.values())
            gone = self._routers.missing((job.router for job in jobs), self._is_live, now_s)
            for job in jobs:
                if job.router in gone:
                    log.warning("router %s is gone: attempt %s ends", job.router, job.key)
                    job.task.cancel()
            for router in gone:
                self.emitter.outbox.forget_router(router)
            lost = self._workers.missing((job.peer for job in jobs if job.peer), self._is_live, now_s)
            for job in jobs:
                if job.peer in lost:
                    job.fail(Unavailable(f"worker {job.peer} is gone"))
            self.tick(now_s)

    def tick(self, now_s: float) -> None:
        """Four times a second: for what a worker lets expire by itself. Nothing, unless it says otherwise."""

    def _is_live(self, id: str) -> bool:
        return self.fleet.state(id) == "live"

    # The engine's thread and the bus

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            if job := self.jobs.get(event.sequence.key):
                job.hear(event)

    def _on_failure(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _end_jobs(self) -> None:
        for job in self.jobs.values():
            job.fail(Unavailable(f"worker {self.id} is stopping"))
        await self.drain()

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
