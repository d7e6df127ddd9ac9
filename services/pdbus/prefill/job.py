"""One attempt at prefill: queue, cached prefix, chunks, first token, and the hand-over beside them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pdbus.context import Deadline
from pdbus.engine.job import Job, to_the_end
from pdbus.engine.prompt import Prompt
from pdbus.engine.sequence import Ended, Event, LayerReady, Produced, Started
from pdbus.engine.version import Pin
from pdbus.messages.prefill import PrefillRun
from pdbus.messages.workers import Cancel
from pdbus.prefill.handoff import Handoff
from pdbus.subjects import CANCEL
from pdbus.tasks import cancelled

if TYPE_CHECKING:
    from pdbus.prefill.worker import PrefillWorker


class PrefillJob(Job):
    """Takes over the pin. Holds it, the sequence with its pages, and the lease at the decode worker."""

    def __init__(self, worker: PrefillWorker, message: PrefillRun, pin: Pin, deadline: Deadline) -> None:
        ticket = message.ticket
        super().__init__(ticket, deadline)
        self._worker, self._pin, self._decode_worker = worker, pin, message.decode_worker
        self._prompt = Prompt(worker.core, worker.l2, ticket, pin.version, deadline, handoff=True)
        self._sequence = self._prompt.sequence
        self._handoff = Handoff(worker, self._sequence, message.decode_worker)
        self.next_index = len(ticket.delivered)
        self._only_one = ticket.max_tokens <= len(ticket.delivered) + 1
        """The first token is the last one: nothing is to be handed over."""

    @property
    def peer(self) -> str | None:
        return None if self._only_one else self._decode_worker

    @property
    def backlog_tokens(self) -> int:
        return 0 if self.ended.done() else self._sequence.remaining

    def hear(self, event: Event) -> None:
        match event:
            case Started():
                self._prompt.started(event)
            case LayerReady():
                if not self._only_one:
                    self._handoff.layer_ready(event)
            case Produced():
                self._first_token(event)
            case Ended():
                self.hear_end(event)

    async def run(self) -> None:
        handing_over: asyncio.Task[None] | None = None
        try:
            self._prompt.submit()
            await self._prompt.admitted(self.ended)
            if not self._only_one:
                handing_over = self._worker.jobs.spawn(self.beside(self._handoff.run))
            self._handoff.cached(await self._prompt.fill())
            await asyncio.shield(self.ended)
            self._prompt.read()
            if self.finished:
                await self._release_decode()
            elif handing_over:
                await asyncio.shield(handing_over)
        finally:
            await to_the_end(self._free(handing_over))

    def _first_token(self, event: Produced) -> None:
        item = self.item(event.ids, event.logprobs, event.finish)
        item = replace(item, cached_tokens=self._prompt.cached_of_prompt, prompt_logprobs=event.prompt_logprobs)
        self._worker.jobs.send(self, item)
        self._worker.jobs.metrics.first_token((time.time_ns() - self.accepted_ns) / 1e9)
        # The router has the prompt's log-probabilities from here; they are large, and decode has no use for them.
        self._handoff.first_token(replace(item, prompt_logprobs=None))

    async def _release_decode(self) -> None:
        """The answer is whole: what the decode worker holds for it, or may still be told to hold, is not needed."""
        cancel = Cancel(self.request_id, self.attempt, self.router, (self._decode_worker,), self.choice, "finished")
        await self._worker.bus.publish(CANCEL(), cancel)

    async def _free(self, handing_over: asyncio.Task[None] | None) -> None:
        """Pages only after nobody reads them: the hand-over goes first."""
        self.closed = True
        await cancelled(handing_over)
        try:
            await self._worker.core.discard(self._sequence)
        finally:
            self._pin.release()
