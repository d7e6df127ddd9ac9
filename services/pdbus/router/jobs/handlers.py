"""Jobs over the bus: `pd.v1.jobs.<model>.{submit,state,cancel,watch}`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from pdbus.bus.bus import Bus
from pdbus.bus.serving import Registration
from pdbus.context import RequestContext
from pdbus.messages.jobs import JobSubmit, JobTold, JobWanted
from pdbus.router.identity import Identities
from pdbus.router.jobs.told import Jobs
from pdbus.subjects import JOB_CANCEL, JOB_STATE, JOB_SUBMIT, JOB_WATCH

_REPLY_S = 1.0
"""Left for telling it, before the caller gives up."""
_MOST = 1024
"""Callers who wait at once."""


class JobHandlers:
    """Whose a job is says the key that the caller shows, each time."""

    def __init__(self, jobs: Jobs, identities: Identities) -> None:
        self._jobs, self._identities = jobs, identities

    async def serve(self, bus: Bus, model: str, stack: AsyncExitStack) -> tuple[Registration[Any, Any], ...]:
        served: tuple[Registration[Any, Any], ...] = (
            await bus.serve(JOB_SUBMIT(model=model), self.submit, limit=_MOST),
            await bus.serve(JOB_STATE(model=model), self.state, limit=_MOST),
            await bus.serve(JOB_CANCEL(model=model), self.cancel, limit=_MOST),
            await bus.serve(JOB_WATCH(model=model), self.watch, limit=_MOST),
        )
        for registration in served:
            await stack.enter_async_context(registration)
        return served

    async def submit(self, message: JobSubmit, ctx: RequestContext) -> JobTold:
        return await self._jobs.submit(message, self._identities.of(ctx.api_key))

    async def state(self, message: JobWanted, ctx: RequestContext) -> JobTold:
        tenant = self._identities.of(ctx.api_key).tenant
        wait_s = min(message.wait_s, ctx.deadline.remaining_s - _REPLY_S)
        return await self._jobs.state(tenant, message.id, wait_s)

    async def cancel(self, message: JobWanted, ctx: RequestContext) -> JobTold:
        return await self._jobs.cancel(self._identities.of(ctx.api_key).tenant, message.id)

    async def watch(self, message: JobWanted, ctx: RequestContext) -> AsyncIterator[JobTold]:
        async for told in self._jobs.watch(self._identities.of(ctx.api_key).tenant, message.id):
            yield told
