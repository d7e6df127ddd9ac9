"""Asks a worker for tokens that have not come. That finds out whether it is there at all, too: also of one that has not
accepted the ticket yet, which a worker that dies at that moment never will."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdbus.bus.bus import Bus
from pdbus.context import RequestContext
from pdbus.errors import DeadlineExceeded, Overloaded, PdbusError, Unavailable
from pdbus.messages.workers import Resend, ResendReply
from pdbus.subjects import DECODE_RESEND, PREFILL_RESEND

if TYPE_CHECKING:
    from pdbus.router.attempt import Attempt
    from pdbus.router.tokens import TokenHub

QUIET_S = 0.3
"""So long without a token, and the worker is asked for it: if it is dead, the bus says at once that nobody is there.
One that is at work is asked ever more rarely."""
PATIENCE_S = 2 * QUIET_S
"""No token, no answer for so long, and no card of late: that is enough. One that is only slow still sends its cards."""
SILENCE_S = 2.0
_RESEND_S = 0.7
"""For the second question; `QUIET_S` for the first."""
_MOST_UNANSWERED = 2


class Questions:
    """Of one attempt, at most one under way."""

    def __init__(self, attempt: Attempt, hub: TokenHub, bus: Bus, ctx: RequestContext) -> None:
        self._attempt, self._hub, self._bus, self._ctx = attempt, hub, bus, ctx
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._asked_s = self._loop.time()
        self._quiet_s = QUIET_S
        self._unanswered = 0
        self._asking: str | None = None
        """The worker that is being asked, since `_since_s`."""
        self._since_s = 0.0

    def heard(self) -> None:
        """A token came."""
        self._heard_s, self._quiet_s, self._unanswered = self._loop.time(), QUIET_S, 0

    def look(self, now_s: float) -> None:
        """Ten times a second."""
        if self._asking is None:
            if now_s - max(self._heard_s, self._asked_s) >= self._quiet_s:
                self.ask()
        elif now_s - self._since_s >= PATIENCE_S and self._unheard(self._asking):
            self._silent(self._asking)

    def ask(self) -> None:
        """For the next token."""
        if self._asking is not None or self._attempt.over:
            return
        ticket = self._attempt.ticket
        if recorder := self._bus.recorder:
            recorder.put("gap", session=ticket.session, attempt=ticket.attempt, index=self._attempt.next_index)
        self._asking = self._attempt.next_from
        self._attempt.own(self._ask(self._asking))

    async def _ask(self, worker: str) -> None:
        """Until nothing is missing that the worker has: a reply holds as much as fits a message."""
        attempt = self._attempt
        try:
            while not attempt.over and worker == attempt.next_from:
                missing, begun = attempt.next_index, attempt.begun(worker)
                state = await self._missing_from(worker, missing)
                if attempt.next_index == missing:
                    if state != "running" and begun:
                        attempt.fail(Unavailable(f"worker {worker} no longer holds the request"), worker)
                    elif (reader := attempt.hands_over) and worker != reader:
                        worker = reader
                        await self._missing_from(worker, missing)
                    self._quiet_s = min(2 * self._quiet_s, SILENCE_S)
                    return
        except DeadlineExceeded:
            self._unanswered += 1
            self._quiet_s = SILENCE_S
            if self._unanswered >= _MOST_UNANSWERED or self._unheard(worker):
                self._silent(worker)
        except Overloaded:  # with questions: it is there, and may well have the answer
            self._unanswered = 0
        except PdbusError as error:
            attempt.fail(error, worker, died=isinstance(error, Unavailable))
        finally:
            self._asking = None
            self._asked_s = self._loop.time()

    async def _missing_from(self, worker: str, index: int) -> str:
        """Takes what the worker sends again from `index` on; returns what it says of the attempt."""
        ticket = self._attempt.ticket
        to = (PREFILL_RESEND if worker == self._attempt.pair.prefill else DECODE_RESEND)(worker=worker)
        self._hub.metrics.resend()
        self._asking = worker
        self._since_s = self._loop.time()
        wanted = Resend(ticket.request_id, ticket.choice, ticket.attempt, index)
        reply: ResendReply
        try:
            reply = await self._bus.call(to, wanted, self._ctx.within(QUIET_S))
        except DeadlineExceeded:  # whoever has died since it was asked serves no more, and that is told at once
            reply = await self._bus.call(to, wanted, self._ctx.within(_RESEND_S))
        self._unanswered = 0
        for item in reply.items:
            self._attempt.deliver(item, worker)
        return reply.state

    def _unheard(self, worker: str) -> bool:
        return self._hub.workers.fleet.state(worker) != "live"

    def _silent(self, worker: str) -> None:
        self._attempt.fail(Unavailable(f"worker {worker} does not answer"), worker, died=True)
