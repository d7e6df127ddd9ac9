"""Jobs as they are kept: accepting, ending and looking them up, by appends that compare first."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdbus.errors import Conflict, NotFound
from pdbus.messages.jobs import JobEntry, JobSpec, JobStatus, JobWork
from pdbus.router.jobs.durable import Durable
from pdbus.router.jobs.shares import Shares
from pdbus.subjects import JOBS, RESULTS

_ANSWER_BYTES = 16 << 10
"""Set aside for the answer of a job that waits, beside its body."""


class JobLog:
    """Raises Unavailable while JetStream is away, Overloaded where it has no room."""

    def __init__(self, logs: Durable, model: str, shares: Shares, now: Callable[[], float] = time.time) -> None:
        self._logs, self._shares = logs, shares
        self._jobs = JOBS(model=model)
        self.now = now

    async def submit(self, spec: JobSpec, body: bytes) -> JobEntry:
        """Returns the job's state: just accepted, or as it is where it was submitted before.

        The message goes first: what the log accepts is in the queue. Raises Conflict for another body under its id,
        QuotaExceeded."""
        known = await self.last(spec.tenant, spec.id)
        if known is None:
            known = await self._submit(spec, body)
        if known.spec.digest != spec.digest:
            raise Conflict("this idempotency key was used for another job", param="Idempotency-Key")
        return known

    async def _submit(self, spec: JobSpec, body: bytes) -> JobEntry:
        with self._shares.hold(spec.tenant, len(body) + _ANSWER_BYTES):
            # Two bodies under one key are two messages; the log decides which of them is the job.
            id_ = f"{spec.tenant}.{spec.id}.{spec.digest.hex()}"
            await self._logs.enqueue(self._jobs, JobWork(spec, body), message_id=id_)
            return await self._accept(spec, body) or await self.accepted(spec, body)

    async def accepted(self, spec: JobSpec, body: bytes) -> JobEntry:
        """Its last entry, after one that accepts it where there was none: its message came before that, or alone."""
        while (known := await self.last(spec.tenant, spec.id)) is None:
            if accepted := await self._accept(spec, body):
                return accepted
        return known

    async def _accept(self, spec: JobSpec, body: bytes) -> JobEntry | None:
        """None: there is an entry of it already."""
        entry = JobEntry("queued", spec, self.now())
        try:
            to, waits = RESULTS(tenant=spec.tenant, job=spec.id), len(body) + _ANSWER_BYTES
            await self._logs.append(to, entry, expected_seq=0, reserves=waits)
        except Conflict:
            return None
        return entry

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
