"""One attempt at one choice: its worker or two, until the answer is whole or one of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Self, TypeVar

from pdbus.bus.bus import Bus
from pdbus.context import RequestContext
from pdbus.errors import Corrupt, DeadlineExceeded, PdbusError, Unavailable
from pdbus.messages.common import Ticket
from pdbus.messages.decode import DecodeRun
from pdbus.messages.prefill import PrefillRun
from pdbus.messages.router import TokenItem
from pdbus.messages.workers import Accepted, CancelReason, Resend
from pdbus.router.output import ChoiceOutput
from pdbus.router.placement import Pair
from pdbus.router.reorder import InOrder
from pdbus.router.tokens import TokenHub
from pdbus.subjects import DECODE_RESEND, DECODE_RUN, PREFILL_RESEND, PREFILL_RUN, To
from pdbus.tasks import cancelled

Q = TypeVar("Q")

ACCEPT_S = 5.0
"""A worker says at once that it has taken a ticket, however long its queue is."""
QUIET_S = 0.3
"""So long without a token, and the worker is asked for it: if it is dead, the bus says at once that nobody is there.
One that is at work is asked ever more rarely."""
SILENCE_S = 2.0
_RESEND_S = 0.7
"""For the second question; `QUIET_S` for the first."""
_MOST_UNANSWERED = 2


class Moved(Unavailable):
    """The attempt has ended so that the next one goes on at `to`, which has its pages. Nothing has failed."""

    to: str

    @classmethod
    def on(cls, to: str) -> Self:
        self = cls(f"the answer moves to {to}")
        self.to = to
        return self


class Attempt:
    """Lives for the length of `run`. `deliver`, `frame_lost` and `look` are the hub's, and never wait."""

    def __init__(self, ticket: Ticket, pair: Pair, output: ChoiceOutput, bus: Bus, ctx: RequestContext) -> None:
        self.ticket = ticket
        self.pair = pair
        self.failed: str | None = None
        """The worker by which the attempt failed, where one is to blame."""
        self.death: tuple[str, str] | None = None
        """The worker, and its incarnation, that had begun and then was not heard of any more."""
        self.ended_by_worker = False
        """The answer is whole, and the decode worker (or prefill, for a single token) knows it."""
        self._holders = (pair.decode,) if pair.prefill is None else (pair.prefill, pair.decode)
        self._reader = self._holders[0]
        """Reads the prompt, and sends the first token."""
        self._output = output
        self._bus = bus
        self._ctx = ctx
        self._order = InOrder(len(ticket.delivered))
        self._incarnations: dict[str, str] = {}
        self._needed = set(self._holders)
        """Workers whose death ends the attempt."""
        self._unanswered = 0
        self._tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = loop.create_future()
        self._heard = self._asked = loop.time()
        self._quiet_s = QUIET_S
        self._asking = False

    async def run(self, hub: TokenHub) -> None:
        """Returns when the answer is whole. Raises what the first failing leg told; all legs are cancelled then."""
        self._hub = hub
        reason: CancelReason | None = None
        try:
            with hub.listening(self), hub.workers.booked(self.pair) as self._booking:
                prefill, decode = self.pair.prefill, self.pair.decode
                if prefill is not None:
                    self._own(self._start(prefill, PREFILL_RUN(worker=prefill), PrefillRun(self.ticket, decode)))
                self._own(self._start(decode, DECODE_RUN(worker=decode), DecodeRun(self.ticket, prefill)))
                await self._over
                reason = "finished" if self.ended_by_worker else "stopped"
        except Moved:
            reason = "finished"  # its worker has ended it itself, and holds nothing of it
            raise
        except PdbusError:
            reason = "peer_failed"
            raise
        finally:
            if reason is None:
                reason = "deadline" if self._ctx.deadline.passed else "client_gone"
            hub.cancels.send(self.ticket, self._holders, reason)
            await cancelled(*self._tasks)
            if self._over.done() and not self._over.cancelled():
                self._over.exception()  # told, or no longer wanted

    def deliver(self, item: TokenItem, worker: str) -> None:
        if item.attempt != self.ticket.attempt:
            self._hub.metrics.dropped("attempt")
        elif item.root != self.ticket.root:
            self._hub.metrics.dropped("root")
        elif not self._over.done():
            self._heard = asyncio.get_running_loop().time()
            self._quiet_s = QUIET_S
            self._unanswered = 0
            self._take(item, worker)

    def frame_lost(self, worker: str) -> None:
        if worker in self._holders:
            self._ask_again()

    def look(self, now_s: float) -> None:
        if now_s - max(self._heard, self._asked) >= self._quiet_s:
            self._ask_again()

    def look_at_workers(self) -> None:
        """The fleet has changed: whether those are still there that the attempt needs."""
        for worker in self._needed:
            if self._hub.workers.gone(worker, self._incarnations.get(worker)):
                self._fail(Unavailable(f"worker {worker} is gone, or hangs"), worker, died=worker in self._incarnations)
                return

    def _take(self, item: TokenItem, worker: str) -> None:
        if item.finish in ("error", "cancelled"):
            error = item.error.to_exception() if item.error else Unavailable(f"worker {worker} gave the request up")
            self._fail(error, worker)
            return
        if self.ticket.sampling.logprobs is not None and len(item.logprobs) != len(item.ids):
            self._fail(Corrupt(f"worker {worker} sent tokens without their log-probabilities"), worker)
            return
        for ready in self._order.add(item):
            self._use(ready)
            if self._over.done():
                return
        if self._order.gap:
            self._ask_again()
        elif self._order.next_index > len(self.ticket.delivered) + 1:
            self._needed &= {self.pair.decode}  # the other's part is done: decode goes on alone

    def _use(self, item: TokenItem) -> None:
        if item.finish == "moved":
            self._over.set_exception(Moved.on(item.moved_to or ""))
            return
        self._booking.prompt_read()
        if recorder := self._bus.recorder:
            session, count = self.ticket.session, len(item.ids)
            recorder.put("token", session=session, attempt=item.attempt, index=item.index, count=count, root=item.root)
        if self.ticket.attempt == 1 and item.cached_tokens is not None:
            self._output.cached_tokens = item.cached_tokens
        finish = item.finish if item.finish in ("stop", "length") else None
        if self.ticket.prompt_logprobs is not None and not self._output.prompt_known:
            if item.prompt_logprobs is None or len(item.prompt_logprobs) != len(self.ticket.prompt) - 1:
                self._fail(Corrupt("the prompt's log-probabilities are missing"), self._reader)
                return
            self._output.prompt(item.prompt_logprobs)
        if self._output.add(item.ids, item.logprobs, finish):
            self.ended_by_worker = item.finish is not None
            self._over.set_result(None)

    def _ask_again(self) -> None:
        """At most one question under way. The first token is its reader's, all others decode's."""
        if self._asking or self._over.done():
            return
        first = self.pair.prefill is not None and self._order.next_index == len(self.ticket.delivered)
        worker = self._reader if first else self.pair.decode
        if recorder := self._bus.recorder:
            recorder.put("gap", session=self.ticket.session, attempt=self.ticket.attempt, index=self._order.next_index)
        if worker in self._incarnations:  # else it has not even accepted yet, and that call has its own deadline
            self._asking = True
            self._own(self._resend(worker, first))

    async def _resend(self, worker: str, first: bool) -> None:
        """Asks until nothing is missing that the worker has: a reply holds as much as fits a message."""
        try:
            while not self._over.done():
                missing = self._order.next_index
                state = await self._missing_from(worker, first, missing)
                if self._order.next_index == missing:
                    if state != "running":
                        self._fail(Unavailable(f"worker {worker} no longer holds the request"), worker)
                    self._quiet_s = min(2 * self._quiet_s, SILENCE_S)
                    return
                if first:
                    return  # the rest is the decode worker's
        except DeadlineExceeded:
            self._unanswered += 1
            self._quiet_s = SILENCE_S
            # No token, no answer, and no card of late: that is enough. One that is only slow still sends its cards.
            silent = self._hub.workers.fleet.state(worker) != "live"
            if silent or self._unanswered >= _MOST_UNANSWERED:
                self._fail(Unavailable(f"worker {worker} does not answer"), worker, died=True)
        except PdbusError as error:
            self._fail(error, worker, died=isinstance(error, Unavailable))
        finally:
            self._asking = False
            self._asked = asyncio.get_running_loop().time()

    async def _missing_from(self, worker: str, first: bool, index: int) -> str:
        """Takes what the worker sends again from `index` on; returns what it says of the attempt."""
        ticket = self.ticket
        to = PREFILL_RESEND(worker=worker) if first else DECODE_RESEND(worker=worker)
        self._hub.metrics.resend()
        wanted = Resend(ticket.request_id, ticket.choice, ticket.attempt, index)
        try:
            reply = await self._bus.call(to, wanted, self._ctx.within(QUIET_S))
        except DeadlineExceeded:  # whoever has died since it was asked serves no more, and that is told at once
            reply = await self._bus.call(to, wanted, self._ctx.within(_RESEND_S))
        self._unanswered = 0
        for item in reply.items:
            self.deliver(item, worker)
        return reply.state

    async def _start(self, worker: str, to: To[Q, Accepted], run: Q) -> None:
        try:
            accepted = await self._bus.call(to, run, self._ctx.within(ACCEPT_S))
        except PdbusError as error:
            self._fail(error, worker)
        else:
            self._incarnations[worker] = accepted.incarnation

    def _fail(self, error: PdbusError, worker: str, *, died: bool = False) -> None:
        """The first failure of either leg counts."""
        if self._over.done():
            return
        self.failed = worker
        if died:
            self.death = worker, self._incarnations[worker]
        if isinstance(error, DeadlineExceeded) and not self._ctx.deadline.passed:
            error = Unavailable(f"worker {worker} did not answer in time")
        self._over.set_exception(error)

    def _own(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
