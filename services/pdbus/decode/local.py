"""One attempt whose prompt is read here as well: no other worker has a part in it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pdbus.context import Deadline
from pdbus.decode.answering import decoding
from pdbus.engine.job import Job, to_the_end
from pdbus.engine.prompt import Prompt
from pdbus.engine.sequence import Ended, Event, Produced, Started
from pdbus.engine.version import Pin
from pdbus.messages.common import Ticket

if TYPE_CHECKING:
    from pdbus.decode.worker import DecodeWorker


class LocalJob(Job):
    """Takes over the pin. Holds it, and the sequence with its pages, from the prompt's first token to the answer's
    last."""

    def __init__(self, worker: DecodeWorker, ticket: Ticket, pin: Pin, deadline: Deadline) -> None:
        super().__init__(ticket, deadline)
        self._worker, self._pin = worker, pin
        self._prompt = Prompt(worker.core, worker.l2, ticket, pin.version, deadline, handoff=False)
        self.sequence = self._prompt.sequence
        self.next_index = len(ticket.delivered)
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The first new token is there."""

    @property
    def peer(self) -> str | None:
        return None

    @property
    def unread(self) -> bool:
        """Nothing of its prompt is computed here yet."""
        return not self._first.done() and not self.sequence.admitted

    @property
    def backlog_tokens(self) -> int:
        return 0 if self._first.done() or self.ended.done() else self.sequence.remaining

    def hear(self, event: Event) -> None:
        match event:
            case Started():
                self._prompt.started(event)
                self._worker.guests.release(self.session)
            case Produced():
                item = self.item(event.ids, event.logprobs, event.finish)
                if not self._first.done():
                    self._first.set_result(None)
                    cached, logprobs = self._prompt.cached_of_prompt, event.prompt_logprobs
                    item = replace(item, cached_tokens=cached, prompt_logprobs=logprobs)
                    self._worker.jobs.metrics.first_token((time.time_ns() - self.accepted_ns) / 1e9)
                self._worker.jobs.send(self, item)
                self._worker.wrote(event)
            case Ended():
                if last := self.moved(event):
                    self._worker.jobs.send(self, last)
                self.hear_end(event)

    async def run(self) -> None:
        try:
            self._prompt.submit()
            await self._prompt.admitted(self.ended)
            await self._prompt.fill()
            await asyncio.wait([self._first, self.ended], return_when=asyncio.FIRST_COMPLETED)
            if self._first.done():
                self._prompt.read()
                if not self._prompt.resumed:
                    self._worker.threshold.local(self._prompt.computed, self._prompt.taken_s)
            with decoding(self.sequence, self._worker.jobs.metrics):
                await asyncio.shield(self.ended)
        finally:
            await to_the_end(self._free())

    async def _free(self) -> None:
        self.closed = True
        try:
            await self._worker.core.discard(self.sequence)
        finally:
            self._pin.release()
