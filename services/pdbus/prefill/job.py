"""One attempt at prefill: queue, cached prefix, chunks, first token, and the hand-over beside them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdbus.context import Deadline
from pdbus.engine.job import Job, to_the_end
from pdbus.engine.sequence import Ended, Event, LayerReady, Produced, Sequence, Started
from pdbus.engine.version import Pin
from pdbus.kv.prefix import page_keys
from pdbus.messages.prefill import PrefillRun
from pdbus.messages.workers import Cancel
from pdbus.prefill.handoff import Handoff
from pdbus.subjects import CANCEL
from pdbus.tasks import cancelled
from pdbus.telemetry import Phase, record_span

if TYPE_CHECKING:
    from pdbus.prefill.worker import PrefillWorker


class PrefillJob(Job):
    """Takes over the pin. Holds it, the sequence with its pages, and the lease at the decode worker."""

    def __init__(self, worker: PrefillWorker, message: PrefillRun, pin: Pin, deadline: Deadline) -> None:
        ticket = message.ticket
        super().__init__(ticket, deadline)
        self._worker, self._pin, self._decode_worker = worker, pin, message.decode_worker
        # A prompt's log-probabilities need every row computed: such a request neither uses nor fills a cache.
        bypass = ticket.prompt_logprobs is not None
        keys = () if bypass else page_keys(ticket.tokens, pin.version.salted(ticket.salt))
        self._sequence = Sequence(
            ticket,
            pin.version,
            deadline,
            worker.core.pages.hold(),
            handoff=True,
            keys=keys,
            ready=False,
        )
        self._handoff = Handoff(worker, self._sequence, message.decode_worker)
        self.next_index = len(ticket.delivered)
        self._started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._cached_tokens = 0
        self._only_one = ticket.max_tokens <= len(ticket.delivered) + 1
        """The first token is the last one: nothing is to be handed over."""

    @property
    def peer(self) -> str | None:
        return None if self._only_one else self._decode_worker

    def hear(self, event: Event) -> None:
        match event:
            case Started():
                if not self._started.done():
                    self._started.set_result(event.cached_tokens)
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
            self._worker.core.submit(self._sequence)
            cached = await self._until_started()
            started_ns = time.time_ns()
            record_span(Phase.QUEUE, self.accepted_ns, started_ns)
            if not self._only_one:
                handing_over = self._worker.jobs.spawn(self.beside(self._handoff.run))
            cached += await self._worker.l2.fill(self._sequence, cached)
            self._cached_tokens = min(cached, len(self._sequence.ticket.prompt))
            self._handoff.cached(cached)
            self._worker.core.resume(self._sequence, cached)
            await asyncio.shield(self.ended)
            computed = len(self._sequence.ticket.tokens) - cached
            attributes = {"gen_ai.usage.cache_read.input_tokens": cached, "pdbus.computed_tokens": computed}
            record_span(Phase.PREFILL, started_ns, time.time_ns(), attributes=attributes)
            self._worker.l2.keep(self._sequence, cached)
            if self.finished:
                await self._release_decode()
            elif handing_over:
                await asyncio.shield(handing_over)
        finally:
            await to_the_end(self._free(handing_over))

    async def _until_started(self) -> int:
        waits: list[asyncio.Future[Any]] = [self._started, self.ended]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            self.ended.result()
        return self._started.result()

    def _first_token(self, event: Produced) -> None:
        item = self.item(event.ids, event.logprobs, event.finish)
        item = replace(item, cached_tokens=self._cached_tokens, prompt_logprobs=event.prompt_logprobs)
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
