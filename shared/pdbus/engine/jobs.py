"""The jobs of one worker: admitted, run as tasks, ended on request, and their failures told to whom they concern."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Generic, TypeVar

from opentelemetry.util.types import AttributeValue

from pdbus.bus.bus import Bus
from pdbus.engine.attempts import Attempts
from pdbus.engine.emitter import Emitter
from pdbus.engine.job import Job, internal
from pdbus.engine.sequence import Key
from pdbus.errors import Overloaded, PdbusError
from pdbus.messages.common import Ticket
from pdbus.messages.decode import Reserve
from pdbus.messages.router import TokenItem
from pdbus.messages.workers import Cancel
from pdbus.subjects import CANCEL
from pdbus.tasks import cancelled
from pdbus.telemetry import WorkerMetrics, tracer

log = logging.getLogger(__name__)

J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """Owns the tasks. `close` has to be awaited; before it, every job has to be ended."""

    def __init__(self, bus: Bus, emitter: Emitter, service: str, model: str, most: int) -> None:
        self.attempts = Attempts()
        self.metrics = WorkerMetrics(model)
        self._bus, self._emitter, self._service = bus, emitter, service
        self._most = most
        self._jobs: dict[Key, J] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[J]:
        return iter(list(self._jobs.values()))

    def get(self, key: Key) -> J | None:
        return self._jobs.get(key)

    def meant_by(self, message: Cancel) -> list[J]:
        """The jobs that a cancel is about."""
        return [
            job
            for job in self
            if job.request_id == message.request_id
            and job.attempt <= message.attempt
            and message.choice in (None, job.choice)
        ]

    def admit(self, wanted: Ticket | Reserve) -> bool:
        """True: the attempt is new here, and there is room. False: it was taken already. Raises why it is refused.

        Where others fill them, up to twice as many are let in: interrupted answers, and a tenant's with less than its
        share of the jobs."""
        attempt, session = wanted.attempt, wanted.session
        if not self.attempts.admit(wanted.request_id, wanted.choice, session, attempt, time.monotonic()):
            return False
        full = self._most * (2 if wanted.interrupted else 1)
        if len(self._jobs) >= full and not self._below_share(wanted.tenant):
            self.attempts.forget(session, attempt)
            raise Overloaded(f"{len(self._jobs)} requests are at work or waiting here", retry_after_s=1.0)
        return True

    def _below_share(self, tenant: str) -> bool:
        held = Counter(job.tenant for job in self._jobs.values())
        return held[tenant] * len(held.keys() | {tenant}) < self._most and len(self._jobs) < 2 * self._most

    def start(self, job: J) -> None:
        """Runs an admitted job. An older attempt of its session ends: its router has given it up."""
        for other in self:
            if other.session == job.session:
                other.stop()
        if recorder := self._bus.recorder:
            recorder.put("pin", session=job.session, attempt=job.attempt, root=job.root)
        self._jobs[job.key] = job
        job.task = self.spawn(self._live(job))

    def send(self, job: Job, item: TokenItem) -> None:
        """Puts a job's next item on its way, unless nobody wants it any more; those of one turn of the event loop share
        a frame."""
        if job.stopping and job.failure is None:
            return
        job.next_index = item.index + len(item.ids)
        job.finished = job.finished or item.finish is not None
        self._emitter.put(job.router, item)

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """A task that lives no longer than this worker."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self) -> None:
        """Returns when no job is left. Bounded by the caller."""
        while self._jobs:
            await asyncio.wait([job.task for job in self])

    async def close(self) -> None:
        await cancelled(*self._tasks)

    async def _live(self, job: J) -> None:
        attributes: dict[str, AttributeValue] = {
            "pdbus.request_id": job.request_id,
            "pdbus.choice": job.choice,
            "pdbus.attempt": job.attempt,
        }
        error: PdbusError | None = None
        try:
            with tracer().start_as_current_span(self._service, attributes=attributes):
                await job.live()
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
            del self._jobs[job.key]
            self._emitter.outbox.close(job.request_id, job.choice, job.attempt, time.monotonic())
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
            await self._bus.publish(CANCEL(), cancel)
