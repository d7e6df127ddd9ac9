"""The prefill worker: reads prompts, hands their KV over, and sends each first token."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.bus.serving import Registration
from pdbus.context import RequestContext
from pdbus.engine.prefix_tier import PrefixTier
from pdbus.engine.scheduler import Limits
from pdbus.engine.tickets import check_addressed, check_ticket, is_name
from pdbus.engine.versions import Versions
from pdbus.engine.worker import LOAD_S, Worker
from pdbus.errors import InvalidRequest
from pdbus.kv.codec import PagePool
from pdbus.messages.prefill import PrefillRun
from pdbus.messages.workers import Accepted, Resend, ResendReply
from pdbus.native.cores import SharedCores
from pdbus.peers.cache import CacheRing
from pdbus.prefill.handoff import Reserving
from pdbus.prefill.job import PrefillJob
from pdbus.subjects import PREFILL_RESEND, PREFILL_RUN, To

MOST_JOBS = 72
"""Twice as many for some (engine/jobs.py), and all of them may come at once, from a worker that was lost."""


class PrefillWorker(Worker[PrefillJob]):
    service: ClassVar[str] = "prefill"

    def __init__(
        self,
        bus: Bus,
        id: str,
        model: str,
        versions: Versions,
        fleet: Fleet,
        pool: PagePool,
        limits: Limits,
        ring: CacheRing,
        cores: SharedCores | None = None,
    ) -> None:
        """`cores`: that it shares with other engines, where it knows of some."""
        super().__init__(bus, id, model, versions, fleet, pool, limits, MOST_JOBS)
        self.l2 = PrefixTier(ring, fleet, self.core)
        self.cores = cores
        self.reserving = Reserving()

    async def prepare(self, stack: contextlib.AsyncExitStack) -> None:
        await stack.enter_async_context(self.l2)

    @property
    def resend_to(self) -> To[Resend, ResendReply]:
        return PREFILL_RESEND(worker=self.id)

    async def serve(self) -> list[Registration[Any, Any]]:
        return [await self.bus.serve(PREFILL_RUN(worker=self.id), self.take_run, limit=2 * MOST_JOBS)]

    def kept(self) -> dict[str, int]:
        return super().kept() | {"pages_to_write": self.l2.to_write}

    async def take_run(self, message: PrefillRun, ctx: RequestContext) -> Accepted:
        """Idempotent: a run that was taken here is accepted again and changes nothing."""
        ticket = message.ticket
        deadline = check_addressed(ticket, self.model)
        if not is_name(message.decode_worker):
            raise InvalidRequest("the decode worker has no name", param="decode_worker")
        pin = await self.versions.pin(ticket.root, deadline.within(LOAD_S))
        with contextlib.ExitStack() as held:
            held.enter_context(pin)
            check_ticket(ticket, pin.version.config)
            if self.jobs.admit(ticket):
                self.jobs.start(PrefillJob(self, message, pin, deadline))
                held.pop_all()
        return self.accepted()
