"""Jobs as they are kept: accepting, ending and looking them up, by appends that compare first."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdbus.errors import Conflict, NotFound
from pdbus.messages.jobs import JobEntry, JobSpec, JobStatus, JobWork
from pdbus.router.jobs.durable import Durable
from pdbus.subjects import JOBS, RESULTS


class JobLog:
    """Raises Unavailable while JetStream is away, Overloaded where it has no room."""

    def __init__(self, logs: Durable, model: str, now: Callable[[], float] = time.time) -> None:
        self._logs = logs
        self._jobs = JOBS(model=model)
        self.now = now

    async def submit(self, spec: JobSpec, body: bytes) -> JobEntry:
        """Returns the job's state: just accepted, or as it is where it was submitted before.

        The message goes first: what the log accepts is in the queue. Raises Conflict for another body under its id."""
        known = await self.last(spec.tenant, spec.id)
        if known is None:
            # Two bodies under one key are two messages; the log decides which of them is the job.
            id_ = f"{spec.tenant}.{spec.id}.{spec.digest.hex()}"
            await self._logs.enqueue(self._jobs, JobWork(spec, body), message_id=id_)
            known = await self.accepted(spec)
        if known.spec.digest != spec.digest:
            raise Conflict("this idempotency key was used for another job", param="Idempotency-Key")
        return known

    async def accepted(self, spec: JobSpec) -> JobEntry:
        """Its last entry, after one that accepts it where there was none: its message came before that, or alone."""
        entry = JobEntry("queued", spec, self.now())
        while (known := await self.last(spec.tenant, spec.id)) is None:
            try:
                await self._logs.append(RESULTS(tenant=spec.tenant, job=spec.id), entry, expected_seq=0)
            except Conflict:
                continue
            return entry
        return known

    async def end(self, spec: JobSpec, status: JobStatus, status_code: int = 0, data: bytes = b"") -> JobEntry:
        """Ends it, unless it has ended. Returns the entry that counts."""
        to = RESULTS(tenant=spec.tenant, job=spec.id)
        while True:
            last = await self._logs.last(to)
            if last is not None and last.entry.final:
                return last.entry
            known = spec if last is None else last.entry.spec
            entry = JobEntry(status, known, self.now(), status_code, data)
            try:
                await self._logs.append(to, entry, expected_seq=0 if last is None else last.seq)
            except Conflict:
                continue
            return entry

    async def last(self, tenant: str, id_: str) -> JobEntry | None:
        found = await self._logs.last(RESULTS(tenant=tenant, job=id_))
        return None if found is None else found.entry

    async def known(self, tenant: str, id_: str) -> JobEntry:
        """Raises NotFound, also for what is another's."""
        if not 0 < len(id_) <= 128 or (found := await self.last(tenant, id_)) is None:
            raise NotFound(f"there is no job {id_[:128]!r}", param="id")
        return found
