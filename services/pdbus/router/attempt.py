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
from pdbus.messages.workers import Accepted, CancelReason
from pdbus.router.output import ChoiceOutput
from pdbus.router.placement import Pair
from pdbus.router.questions import Questions
from pdbus.router.reorder import InOrder
from pdbus.router.tokens import TokenHub
from pdbus.subjects import DECODE_RUN, PREFILL_RUN, To
from pdbus.tasks import cancelled

Q = TypeVar("Q")

ACCEPT_S = 5.0
"""A worker says at once that it has taken a ticket, however long its queue is."""


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
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, hub: TokenHub) -> None:
        """Returns when the answer is whole. Raises what the first failing leg told; all legs are cancelled then."""
        self._hub = hub
        self._questions = Questions(self, hub, self._bus, self._ctx)
        self._chosen = {id: card.incarnation for id in self._holders if (card := hub.workers.fleet.card(id))}
        reason: CancelReason | None = None
        try:
            with hub.listening(self), hub.workers.booked(self.pair) as self._booking:
                prefill, decode = self.pair.prefill, self.pair.decode
                if prefill is not None:
                    self.own(self._start(prefill, PREFILL_RUN(worker=prefill), PrefillRun(self.ticket, decode)))
                self.own(self._start(decode, DECODE_RUN(worker=decode), DecodeRun(self.ticket, prefill)))
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
            self._questions.heard()
            self._take(item, worker)

    def frame_lost(self, worker: str) -> None:
        if worker in self._holders:
            self._questions.ask()

    def look(self, now_s: float) -> None:
        self._questions.look(now_s)

    def look_at_workers(self) -> None:
        """The fleet has changed: whether those are still there that the attempt needs."""
        for worker in self._needed:
            if self._hub.workers.gone(worker, self._incarnations.get(worker, self._chosen.get(worker))):
                self.fail(Unavailable(f"worker {worker} is gone, or hangs"), worker, died=True)
                return

    # What its questions need to know

    @property
    def over(self) -> bool:
        return self._over.done()

    @property
    def next_index(self) -> int:
        """Of the token that is missing."""
        return self._order.next_index

    @property
    def next_from(self) -> str:
        """The worker that has the missing token: the first one is its reader's, all others decode's."""
        return self._reader if self.next_index == len(self.ticket.delivered) else self.pair.decode

    @property
    def hands_over(self) -> str | None:
        """The prefill worker, while the decode worker may still wait for what it has."""
        return self.pair.prefill if self.pair.prefill in self._needed else None

    def begun(self, worker: str) -> bool:
        """It has accepted the ticket."""
        return worker in self._incarnations

    def _take(self, item: TokenItem, worker: str) -> None:
        if item.finish in ("error", "cancelled"):
            error = item.error.to_exception() if item.error else Unavailable(f"worker {worker} gave the request up")
            self.fail(error, worker)
            return
        if self.ticket.sampling.logprobs is not None and len(item.logprobs) != len(item.ids):
            self.fail(Corrupt(f"worker {worker} sent tokens without their log-probabilities"), worker)
            return
        for ready in self._order.add(item):
            self._use(ready)
            if self._over.done():
                return
        if self._order.gap:
            self._questions.ask()
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
                self.fail(Corrupt("the prompt's log-probabilities are missing"), self._reader)
                return
            self._output.prompt(item.prompt_logprobs)
        if self._output.add(item.ids, item.logprobs, finish):
            self.ended_by_worker = item.finish is not None
            self._over.set_result(None)

    async def _start(self, worker: str, to: To[Q, Accepted], run: Q) -> None:
        try:
            accepted = await self._bus.call(to, run, self._ctx.within(ACCEPT_S))
        except PdbusError as error:
            self.fail(error, worker)
        else:
            self._incarnations[worker] = accepted.incarnation

    def fail(self, error: PdbusError, worker: str, *, died: bool = False) -> None:
        """The first failure of either leg counts. `died`: the worker is not heard of any more."""
        if self._over.done():
            return
        self.failed = worker
        if died and self.begun(worker):
            self.death = worker, self._incarnations[worker]
        if isinstance(error, DeadlineExceeded) and not self._ctx.deadline.passed:
            error = Unavailable(f"worker {worker} did not answer in time")
        self._over.set_exception(error)

    def own(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
