"""The decode worker: grants leases, takes runs, and writes tokens once it has both halves of an attempt."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any, ClassVar

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.bus.serving import Registration
from pdbus.context import Deadline, RequestContext
from pdbus.decode.guests import Guests
from pdbus.decode.job import DecodeJob
from pdbus.decode.leases import LEASE_S, Leases, PageLease
from pdbus.decode.local import LocalJob
from pdbus.decode.moving import Mover
from pdbus.decode.threshold import Threshold
from pdbus.engine.prefix_tier import PrefixTier
from pdbus.engine.scheduler import Limits
from pdbus.engine.sequence import Produced
from pdbus.engine.tickets import check_addressed, check_attempt, check_ticket
from pdbus.engine.version import Pin
from pdbus.engine.versions import Versions
from pdbus.engine.worker import LOAD_S, Worker
from pdbus.errors import Cancelled, Conflict, InvalidRequest, Overloaded, StaleAttempt, TooLarge, Unavailable
from pdbus.kv.codec import PagePool
from pdbus.kv.page_hold import PageHold
from pdbus.kv.swap_file import SwapFile
from pdbus.messages.common import Ticket
from pdbus.messages.decode import DecodeRun, Lease, Reserve
from pdbus.messages.presence import Load
from pdbus.messages.workers import Accepted, Resend, ResendReply
from pdbus.native.cores import SharedCores
from pdbus.peers.cache import CacheRing
from pdbus.subjects import ANY, DECODE_ADOPT, DECODE_PAGES, DECODE_RESEND, DECODE_RESERVE, DECODE_RUN, KV, To

MOST_JOBS = 128
"""Twice as many for some (engine/jobs.py), and all of them may come at once, from a worker that was lost."""
MOST_LEASES = 24
"""Each is a bulk stream under way; their frames together have to stay within what the bus may buffer."""

_SNAPSHOT_PAGES = 2
"""At a time, once an answer has snapshots: each page is written once in any case, and what is not is computed again."""


class DecodeWorker(Worker[DecodeJob | LocalJob]):
    service: ClassVar[str] = "decode"

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
        swap: SwapFile | None = None,
        cores: SharedCores | None = None,
        *,
        colocated: bool = False,
        snapshot_tokens: int = 0,
    ) -> None:
        """`cores`: that it shares with other engines, where it knows of some.
        `colocated`: it asks for all prompts, not only for those that it reads sooner than others.
        `snapshot_tokens`: after so many of an answer its pages go to the cache nodes, and from then on as they are
        filled; 0: never."""
        super().__init__(bus, id, model, versions, fleet, pool, limits, MOST_JOBS, swap)
        self.l2 = PrefixTier(ring, fleet, self.core)
        self._swap, self._cores = swap, cores
        self.leases = Leases(MOST_LEASES)
        self.threshold = Threshold(limits.page_tokens, limits.chunk_tokens, colocated=colocated)
        self.snapshot_tokens = snapshot_tokens
        self._pages_tokens = _SNAPSHOT_PAGES * limits.page_tokens
        self.guests = Guests(self)
        self.mover = Mover(self)

    async def prepare(self, stack: contextlib.AsyncExitStack) -> None:
        await stack.enter_async_context(self.l2)
        stack.callback(self.guests.close)
        await stack.enter_async_context(await self.bus.serve(DECODE_PAGES(worker=self.id), self.mover.send_pages))

    @property
    def local_tokens(self) -> int:
        return self.threshold.tokens(self.backlog_tokens)

    @property
    def resend_to(self) -> To[Resend, ResendReply]:
        return DECODE_RESEND(worker=self.id)

    async def serve(self) -> list[Registration[Any, Any]]:
        await self.bus.bulk.listen(KV.name(worker=self.id, session=ANY, attempt=ANY))
        return [
            await self.bus.serve(DECODE_RESERVE(worker=self.id), self.reserve),
            await self.bus.serve(DECODE_RUN(worker=self.id), self.take_run, limit=2 * MOST_JOBS),
            await self.bus.serve(DECODE_ADOPT(worker=self.id), self.guests.adopt),
        ]

    def wrote(self, event: Produced) -> None:
        """Makes a snapshot of the answer, where it is time for one."""
        more = event.index + 1 - self.snapshot_tokens
        if self.snapshot_tokens and more >= 0 and more % self._pages_tokens == 0 and event.finish is None:
            self.l2.snapshot(event.sequence)

    def load(self) -> Load:
        return replace(super().load(), leases=len(self.leases) + len(self.guests))

    async def drain(self) -> None:
        """What has no token yet starts again elsewhere, answers move, and what can do neither is finished."""
        await self.mover.empty()

    def held(self) -> dict[str, int]:
        swapped = self._swap.used_slots if self._swap else 0
        return super().held() | {"leases": len(self.leases), "guests": len(self.guests), "swapped_pages": swapped}

    def kept(self) -> dict[str, int]:
        return super().kept() | {"pages_to_write": self.l2.to_write}

    def tick(self, now_s: float) -> None:
        self.guests.expire(now_s)
        self.mover.rebalance(now_s)
        for lease in self.leases.expired(now_s):
            if job := self.jobs.get(lease.key):
                job.stop(Unavailable(f"no KV came from {lease.reserve.prefill_worker} for {LEASE_S:.0f} s"))

    async def take_run(self, message: DecodeRun, ctx: RequestContext) -> Accepted:
        """Idempotent: a run that was taken, or whose attempt ended here, is accepted again and changes nothing."""
        ticket = message.ticket
        deadline = check_addressed(ticket, self.model)
        pin = await self.versions.pin(ticket.root, deadline.within(LOAD_S))
        with contextlib.ExitStack() as held:
            held.enter_context(pin)
            check_ticket(ticket, pin.version.config)
            if message.prefill_worker is None:
                taken = self._read_here(ticket, pin, deadline)
            else:
                job = self._job(ticket, message.prefill_worker, deadline)
                if taken := job is not None and not job.has_run:
                    job.take_run(message, pin)
            if taken:
                held.pop_all()
        return self.accepted()

    def _read_here(self, ticket: Ticket, pin: Pin, deadline: Deadline) -> bool:
        """Starts a job that reads the prompt here, and takes over the pin; False where it was taken already."""
        if isinstance(self.jobs.get((ticket.session, ticket.attempt)), DecodeJob):
            raise Conflict(f"attempt {ticket.attempt} of {ticket.session} waits for a hand-over")
        if not self.jobs.admit(ticket):
            return False
        self.jobs.start(LocalJob(self, ticket, pin, deadline))
        return True

    async def reserve(self, message: Reserve, ctx: RequestContext) -> Lease:
        """Idempotent: the same reservation again gets the same lease."""
        deadline = Deadline.from_wire(message.deadline_ns)
        deadline.check("pages were reserved")
        check_attempt(message)
        if message.page_format != str(self.pool.format):
            raise Conflict(f"pages of {message.page_format} don't fit the pages here, {self.pool.format}")
        job = self._leased(message) or await self._grant(message, deadline)
        await job.listening.wait()
        if job.closed:
            raise Cancelled(f"attempt {message.attempt} of {message.session} has ended")
        return Lease(self.bus.incarnation, int(LEASE_S * 1e3), self._cores.id if self._cores else "")

    async def _grant(self, message: Reserve, deadline: Deadline) -> DecodeJob:
        if self.leases.full:
            raise Overloaded(f"{len(self.leases)} prompts are arriving here already", retry_after_s=0.5)
        pin = await self.versions.pin(message.root, deadline.within(LOAD_S))
        with contextlib.ExitStack() as held:
            held.enter_context(pin)
            if not 0 < message.tokens < pin.version.config.max_positions:
                raise InvalidRequest(f"KV of {message.tokens} tokens does not fit the context", param="tokens")
            hold = self.core.pages.hold(message.tenant)
            held.callback(self.core.post, hold.release)
            await self.core.call(lambda: self._allocate(hold, message))
            # Another message of this attempt may have been served meanwhile; from here on nothing awaits.
            job = self._leased(message)
            if job is None:
                job = self._job(message, message.prefill_worker, deadline)
                if job is None:
                    raise StaleAttempt(f"attempt {message.attempt} of {message.session} is over here")
                job.grant(PageLease(message, hold, time.monotonic()), pin)
                held.pop_all()
        return job

    def _allocate(self, hold: PageHold, message: Reserve) -> None:
        """Pages for the prompt and the first token, such that every running answer can still grow by one; as a prompt
        that is read here would get them (engine/scheduler.py)."""
        wanted = self.pool.format.pages_for(message.tokens + 1)
        if wanted > self.core.pages.total:
            raise TooLarge(f"{message.tokens} tokens are more than this worker's KV pool holds", param="tokens")
        if not self.core.make_room(message.tenant, message.priority, wanted, interrupted=message.interrupted):
            raise Overloaded("no KV pages are free here", retry_after_s=0.5)
        hold.allocate(wanted)

    def _leased(self, message: Reserve) -> DecodeJob | None:
        """The job that has this lease already. Raises Conflict where its reservation was another."""
        job = self._two_legged(message)
        if job is None or job.closed or job.lease is None:
            return None
        if job.lease.reserve != message:
            raise Conflict(f"attempt {message.attempt} of {message.session} was reserved otherwise")
        return job

    def _job(self, attempt: Ticket | Reserve, prefill_worker: str, deadline: Deadline) -> DecodeJob | None:
        """The attempt's job, a new one if need be; None where it has ended here. Raises why it is refused."""
        job = self._two_legged(attempt)
        if job is not None and not job.closed and not job.stopping:
            return job
        if not self.jobs.admit(attempt):
            return None
        job = DecodeJob(self, attempt, prefill_worker, deadline)
        self.jobs.start(job)
        return job

    def _two_legged(self, attempt: Ticket | Reserve) -> DecodeJob | None:
        """The attempt's job. Raises Conflict where that reads its prompt here."""
        job = self.jobs.get((attempt.session, attempt.attempt))
        if isinstance(job, LocalJob):
            raise Conflict(f"the prompt of attempt {attempt.attempt} of {attempt.session} is read here")
        return job
