"""Jobs as they are kept: accepting, ending and looking them up, by appends that compare first."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable

from pdbus.bus.follower import Record
from pdbus.errors import Conflict, NotFound
from pdbus.messages.jobs import JobEntry, JobSpec, JobStatus, JobWork
from pdbus.router.jobs.durable import Durable, Patient
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
        self._submitting: dict[tuple[str, str], asyncio.Future[Record[JobEntry] | None]] = {}
        """What is about to be accepted here: its message may be taken before that."""

    def patient(self) -> JobLog:
        """The same, for who works on what was accepted (durable.py)."""
        made = copy.copy(self)
        made._logs = Patient(self._logs)
        return made

    async def submit(self, spec: JobSpec, body: bytes) -> JobEntry:
        """Returns the job's state: just accepted, or as it is where it was submitted before.

        The message goes first: what the log accepts is in the queue. Raises Conflict for another body under its id,
        QuotaExceeded."""
        known = await self.last(spec.tenant, spec.id) or (await self._submit(spec, body)).entry
        if known.spec.digest != spec.digest:
            raise Conflict("this idempotency key was used for another job", param="Idempotency-Key")
        return known

    async def _submit(self, spec: JobSpec, body: bytes) -> Record[JobEntry]:
        name = spec.tenant, spec.id
        accepted: Record[JobEntry] | None = None
        with self._shares.hold(spec.tenant, len(body) + _ANSWER_BYTES):
            coming = asyncio.get_running_loop().create_future()
            mine = self._submitting.setdefault(name, coming) is coming
            try:
                # Two bodies under one key are two messages; the log decides which of them is the job.
                id_ = f"{spec.tenant}.{spec.id}.{spec.digest.hex()}"
                await self._logs.enqueue(self._jobs, JobWork(spec, body), message_id=id_)
                accepted = await self._accept(spec, body) or await self._accepted(spec, body)
                return accepted
            finally:
                coming.set_result(accepted)
                if mine:
                    del self._submitting[name]

    async def accepted(self, spec: JobSpec, body: bytes) -> Record[JobEntry]:
        """Its last entry, after one that accepts it where there was none: its message came before that, or alone."""
        coming = self._submitting.get((spec.tenant, spec.id))
        if coming and (accepted := await asyncio.shield(coming)):
            return accepted
        return await self._accepted(spec, body)

    async def _accepted(self, spec: JobSpec, body: bytes) -> Record[JobEntry]:
        to = RESULTS(tenant=spec.tenant, job=spec.id)
        while (known := await self._logs.last(to)) is None:
            if accepted := await self._accept(spec, body):
                return accepted
        return known

    async def _accept(self, spec: JobSpec, body: bytes) -> Record[JobEntry] | None:
        """None: there is an entry of it already."""
        entry = JobEntry("queued", spec, self.now())
        to, waits = RESULTS(tenant=spec.tenant, job=spec.id), len(body) + _ANSWER_BYTES
        try:
            seq = await self._logs.append(to, entry, expected_seq=0, reserves=waits)
        except Conflict:
            return None
        return Record(seq, int(entry.at_s * 1e9), entry)

    async def end(
        self,
        spec: JobSpec,
        status: JobStatus,
        status_code: int = 0,
        data: bytes = b"",
        *,
        tokens: int = 0,
        last: Record[JobEntry] | None = None,
    ) -> JobEntry:
        """Ends it, unless it has ended. Returns the entry that counts. `last`: its last entry, as far as is known."""
        to = RESULTS(tenant=spec.tenant, job=spec.id)
        last = last or await self._logs.last(to)
        while last is None or not last.entry.final:
            known = spec if last is None else last.entry.spec
            entry = JobEntry(status, known, self.now(), status_code, data, tokens)
            try:
                await self._logs.append(to, entry, expected_seq=0 if last is None else last.seq)
            except Conflict:
                last = await self._logs.last(to)
                continue
            return entry
        return last.entry

    async def last(self, tenant: str, id_: str) -> JobEntry | None:
        found = await self._logs.last(RESULTS(tenant=tenant, job=id_))
        return None if found is None else found.entry

    async def known(self, tenant: str, id_: str) -> JobEntry:
        """Raises NotFound, also for what is another's."""
        if not 0 < len(id_) <= 128 or (found := await self.last(tenant, id_)) is None:
            raise NotFound(f"there is no job {id_[:128]!r}", param="id")
        return found
