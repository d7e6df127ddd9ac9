"""The state of jobs as it is told to whoever may know it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from pdbus.context import HIGHEST_PRIORITY, new_id
from pdbus.errors import DeadlineExceeded, InvalidRequest
from pdbus.messages.jobs import JobEntry, JobSpec, JobSubmit, JobTold
from pdbus.router.identity import Identity
from pdbus.router.jobs.execute import Executor, failure
from pdbus.router.jobs.job_log import JobLog
from pdbus.router.jobs.progress import LOOK_AGAIN_S, Progress, wait_news
from pdbus.router.jobs.states import LIFE_S, body_digest, canonical_body, job_id
from pdbus.router.quotas import Quotas

MOST_BODY_BYTES = 512 << 10
"""A job waits as one message."""
MOST_METADATA = 16
_LONGEST_METADATA = 512


class Jobs:
    """Submitting, asking after, waiting for and cancelling jobs, for one caller at a time."""

    def __init__(self, jobs: JobLog, executor: Executor, progress: Progress, quotas: Quotas) -> None:
        self._jobs, self._executor, self._progress, self._quotas = jobs, executor, progress, quotas

    async def submit(self, asked: JobSubmit, identity: Identity) -> JobTold:
        """Returns once the job can't be lost. It counts as a request of the key's quota, and again when it runs.

        Raises InvalidRequest, Conflict for another job under its key, Overloaded (also by the quota), Unavailable: it
        may then be there, and the same key finds it."""
        check_metadata(asked.metadata)
        if not 0 <= asked.priority <= HIGHEST_PRIORITY:
            raise InvalidRequest(f"priority must be 0 to {HIGHEST_PRIORITY}", param="priority")
        try:
            body = canonical_body(asked.body)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the body is no JSON: {error}") from None
        if len(body) > MOST_BODY_BYTES:
            raise InvalidRequest(f"the body has {len(body)} bytes; a job's has {MOST_BODY_BYTES} at most", param="body")
        self._executor.check(asked.endpoint, body)
        now = self._jobs.now()
        spec = JobSpec(
            identity.tenant,
            job_id(identity.tenant, asked.idempotency_key or new_id()),
            asked.endpoint,
            body_digest(asked.endpoint, body),
            identity.key_id,
            now,
            now + LIFE_S,
            dict(asked.metadata),
            priority=min(asked.priority, identity.priority_most),
        )
        with self._quotas.hold(identity, 0):
            entry = await self._jobs.submit(spec, body)
        if not entry.final and not self._progress.heard(spec.tenant, spec.id):
            await self._progress.tell(spec.tenant, spec.id, entry.status)
        return self._told(entry)

    async def state(self, tenant: str, id_: str, wait_s: float = 0.0) -> JobTold:
        """After its end, or `wait_s`. Raises NotFound."""
        end = asyncio.get_running_loop().time() + wait_s
        with self._progress.news(tenant, id_, end_only=True) as news:
            while True:
                told = await self._now(tenant, id_)
                left_s = end - asyncio.get_running_loop().time()
                if told.final or left_s <= 0:
                    return told
                await wait_news(news, min(left_s, LOOK_AGAIN_S))

    async def watch(self, tenant: str, id_: str) -> AsyncIterator[JobTold]:
        """Its state, and each change of it until it has ended. Raises NotFound."""
        before: JobTold | None = None
        with self._progress.news(tenant, id_) as news:
            while True:
                told = await self._now(tenant, id_)
                if told != before:
                    yield told
                if told.final:
                    return
                before = told
                await wait_news(news, LOOK_AGAIN_S)

    async def cancel(self, tenant: str, id_: str) -> JobTold:
        """Ends it without a result, unless it has one. Raises NotFound."""
        known = await self._jobs.known(tenant, id_)
        entry = await self._jobs.end(known.spec, "cancelled")
        await self._progress.tell(tenant, id_, entry.status)
        return self._told(entry)

    async def _now(self, tenant: str, id_: str) -> JobTold:
        entry = await self._jobs.known(tenant, id_)
        if not entry.final and self._jobs.now() >= entry.spec.expires_s:  # and no router came to say so
            late = failure(DeadlineExceeded("there was no room for it within a day"))
            entry = await self._jobs.end(entry.spec, "failed", late.status_code, late.data)
        return self._told(entry)

    def _told(self, entry: JobEntry) -> JobTold:
        spec = entry.spec
        tokens = None if entry.final else self._progress.at_work(spec.tenant, spec.id)
        return JobTold(
            spec.id,
            entry.status if tokens is None else "running",
            spec.endpoint,
            spec.created_s,
            spec.expires_s,
            entry.at_s if entry.final else None,
            entry.tokens if tokens is None else tokens,
            entry.status_code,
            entry.data,
            spec.metadata,
        )


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises InvalidRequest."""
    if len(metadata) > MOST_METADATA or any(len(k) > 64 or len(v) > _LONGEST_METADATA for k, v in metadata.items()):
        reason = f"metadata has {MOST_METADATA} entries at most, of 64 and {_LONGEST_METADATA} characters"
        raise InvalidRequest(reason, param="metadata")
