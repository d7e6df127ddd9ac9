"""What prefill and decode workers share: admission and end of jobs, items to routers, cancel, and watching peers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.bus.serving import Registration
from pdbus.context import RequestContext
from pdbus.engine.absence import Absence
from pdbus.engine.core import Core
from pdbus.engine.emitter import Emitter
from pdbus.engine.job import Job
from pdbus.engine.jobs import Jobs
from pdbus.engine.kv_index import KvIndexPublisher
from pdbus.engine.scheduler import Limits
from pdbus.engine.sequence import Ended, Event
from pdbus.engine.tickets import is_name
from pdbus.engine.versions import Versions
from pdbus.errors import Unavailable
from pdbus.kv.codec import PagePool
from pdbus.kv.swap_file import SwapFile
from pdbus.messages.presence import Load
from pdbus.messages.router import TokenItem
from pdbus.messages.workers import Accepted, Cancel, Resend, ResendReply
from pdbus.subjects import CANCEL, To

log = logging.getLogger(__name__)

J = TypeVar("J", bound=Job)

LOAD_S = 3.0
"""How long a request waits for a version that is not loaded, before it is sent elsewhere."""
_TICK_S = 0.25
_ROUTER_GONE_S = 2.0
"""After the first second without a card, by which a peer stops being live: so 3 s in all."""
_WORKER_GONE_S = 1.0
_MOST_QUESTIONS = 1024
"""A frame that is lost has routers ask for all answers in it at once."""


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
        pool: PagePool,
        limits: Limits,
        most_jobs: int,
        swap: SwapFile | None = None,
    ) -> None:
        self.bus, self.id, self.model, self.versions, self.fleet, self.pool = bus, id, model, versions, fleet, pool
        self.limits = limits
        self.emitter = Emitter(bus, id)
        self.jobs: Jobs[J] = Jobs(bus, self.emitter, self.service, model, most_jobs)
        self.failed = asyncio.get_running_loop().create_future()
        """Ends with an error if the engine dies."""
        self.core = Core(pool, limits, self._on_events, self._on_failure, swap)
        self._registrations: list[Registration[Any, Any]] = []
        self._routers, self._workers = Absence(_ROUTER_GONE_S), Absence(_WORKER_GONE_S)

    async def prepare(self, stack: contextlib.AsyncExitStack) -> None:
        """Enters what has to live longer than any job. Nothing, unless a worker says otherwise."""

    @property
    def local_tokens(self) -> int:
        """As its card says (messages/presence.py)."""
        return 0

    @property
    def backlog_tokens(self) -> int:
        return sum(job.backlog_tokens for job in self.jobs)

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
            await stack.enter_async_context(KvIndexPublisher(self.bus, self.id, self.core))
            stack.push_async_callback(self.jobs.close)
            self.jobs.spawn(self._watch())
            await self.prepare(stack)
            stack.push_async_callback(self._end_jobs)
            await stack.enter_async_context(await self.bus.subscribe(CANCEL(), self._on_cancel))
            questions = await self.bus.serve(self.resend_to, self.resend, limit=_MOST_QUESTIONS)
            await stack.enter_async_context(questions)
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
        await self.jobs.drain()

    def load(self) -> Load:
        return Load(
            running=self.core.running,
            waiting=max(len(self.jobs) - self.core.running, 0),
            backlog_tokens=self.backlog_tokens,
            slots=self.limits.running,
            pages_total=self.core.pages.total,
            pages_used=self.core.pages.used,
            streams=self.bus.bulk.open_streams,
            bytes_used=self.core.pages.used * self.pool.format.page_bytes,
            bytes_total=self.core.pages.total * self.pool.format.page_bytes,
        )

    def held(self) -> dict[str, int]:
        """As Service.held."""
        return {
            "running": self.core.running,
            "waiting": self.core.waiting,
            "preempted": self.core.preempted,
            "sequences": self.core.live,
            "jobs": len(self.jobs),
            "pages": self.core.pages.used,
            "unacknowledged": len(self.emitter.outbox),
        }

    def kept(self) -> dict[str, int]:
        """As Service.kept."""
        return {"cached_pages": self.core.pages.cached, "attempts": len(self.jobs.attempts)}

    def accepted(self) -> Accepted:
        return Accepted(self.id, self.bus.incarnation, self.core.waiting)

    async def resend(self, message: Resend, ctx: RequestContext) -> ResendReply:
        reply = self.emitter.outbox.resend(message)
        at_work = self.jobs.get((message.session, message.attempt))
        return ResendReply("running") if reply.state == "unknown" and at_work else reply

    # Cancel, and peers that are gone

    def _on_cancel(self, message: Cancel) -> None:
        self.jobs.attempts.cancel(message, time.monotonic())
        if self.id in message.holders:  # from the router; what a worker tells another says nothing of our items
            self.emitter.outbox.acknowledge(message)
        jobs = self.jobs.meant_by(message)
        for job in jobs:
            job.stop()
        self.jobs.spawn(self._answer_cancel(message, jobs))

    async def _answer_cancel(self, message: Cancel, jobs: list[J]) -> None:
        """Answers once all that the jobs held is free."""
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
            jobs = list(self.jobs)
            gone = self._routers.missing((job.router for job in jobs), self._is_live, now_s)
            for job in jobs:
                if job.router in gone:
                    log.warning("router %s is gone: attempt %s ends", job.router, job.key)
                    job.stop()
            for router in gone:
                self.emitter.outbox.forget_router(router)
            lost = self._workers.missing((job.peer for job in jobs if job.peer), self._is_live, now_s)
            for job in jobs:
                if job.peer in lost:
                    job.stop(Unavailable(f"worker {job.peer} is gone"))
            self.tick(now_s)

    def tick(self, now_s: float) -> None:
        """Four times a second: for what a worker lets expire by itself. Nothing, unless it says otherwise."""

    def _is_live(self, id: str) -> bool:
        return self.fleet.state(id) == "live"

    # The engine's thread and the bus

    def _on_events(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Ended) and self.bus.recorder:
                session, attempt = event.sequence.key
                root = event.sequence.version.root
                self.bus.recorder.put("computed", session=session, attempt=attempt, root=root)
            if job := self.jobs.get(event.sequence.key):
                job.hear(event)

    def _on_failure(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _end_jobs(self) -> None:
        for job in self.jobs:
            job.stop(Unavailable(f"worker {self.id} is stopping"))
        await self.jobs.drain()
