"""One attempt at decode: its lease fills with the prompt's KV, the router's run comes, then the answer is computed."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from pdbus.context import Deadline
from pdbus.decode.answering import decoding
from pdbus.decode.leases import PageLease
from pdbus.decode.receive import receive
from pdbus.engine.job import Job, to_the_end
from pdbus.engine.sequence import Ended, Event, Produced, Sequence
from pdbus.engine.version import Pin, Version
from pdbus.errors import Conflict, Corrupt, DeadlineExceeded
from pdbus.kv.prefix import PrefixScope, page_keys, tokens_digest
from pdbus.messages.common import Ticket
from pdbus.messages.decode import DecodeRun, KvFinal, Reserve
from pdbus.tasks import cancelled
from pdbus.telemetry import Phase, record_span

if TYPE_CHECKING:
    from pdbus.decode.worker import DecodeWorker


class DecodeJob(Job):
    """Starts with whichever comes first: the reservation of the prefill worker, or the router's run."""

    def __init__(
        self, worker: DecodeWorker, attempt: Ticket | Reserve, prefill_worker: str, deadline: Deadline
    ) -> None:
        super().__init__(attempt, deadline)
        self._worker, self._prefill_worker = worker, prefill_worker
        self.lease: PageLease | None = None
        self.listening = asyncio.Event()
        """Frames of the lease are taken from now on, or will never be."""
        self._run: DecodeRun | None = None
        self._pins: list[Pin] = []
        self._granted_s = 0.0
        self._complete = asyncio.Event()
        self._receiver: asyncio.Task[None] | None = None
        self.sequence: Sequence | None = None
        """From when it joins the running ones."""

    @property
    def peer(self) -> str | None:
        """The prefill worker, until all of the KV is here."""
        return None if self.lease and self.lease.final else self._prefill_worker

    def grant(self, lease: PageLease, pin: Pin) -> None:
        """Takes over pages and pin, and begins to receive into the pages."""
        self.lease, self._granted_s = lease, time.monotonic()
        self._pins.append(pin)
        self._worker.leases.add(lease)
        self._receiver = self._worker.jobs.spawn(self.beside(partial(self._receive, lease)))

    def take_run(self, message: DecodeRun, pin: Pin) -> None:
        """Takes over the pin."""
        self._run = message
        self._pins.append(pin)
        self._check_complete()

    @property
    def has_run(self) -> bool:
        return self._run is not None

    async def run(self) -> None:
        try:
            try:
                async with self.deadline.timeout():
                    await self._complete.wait()
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed before the prompt's KV had arrived") from None
            await self._decode(*self._sound())
        finally:
            await to_the_end(self._free())

    def hear(self, event: Event) -> None:
        if isinstance(event, Produced):
            self._worker.jobs.send(self, self.item(event.ids, event.logprobs, event.finish))
            self._worker.wrote(event)
        elif isinstance(event, Ended):
            if last := self.moved(event):
                self._worker.jobs.send(self, last)
            self.hear_end(event)

    async def _receive(self, lease: PageLease) -> None:
        started_ns = time.time_ns()
        await receive(self._worker, lease, self.deadline, self.listening)
        record_span(Phase.KV_TRANSFER, started_ns, time.time_ns(), attributes={"pdbus.frames": lease.frames})
        assert lease.final
        computed = lease.reserve.tokens - (lease.final.first.cached_tokens or 0)
        self._worker.threshold.handed_over(computed, time.monotonic() - self._granted_s)
        self._check_complete()

    def _check_complete(self) -> None:
        if self._run and self.lease and self.lease.final:
            self._complete.set()

    def _sound(self) -> tuple[DecodeRun, PageLease, KvFinal]:
        """Run, lease and final frame, if the three speak of the same. Raises Conflict."""
        run, lease = self._run, self.lease
        assert run
        assert lease
        assert lease.final
        reserve, ticket = lease.reserve, run.ticket
        told = (reserve.root, reserve.tokens, reserve.router, reserve.prefill_worker)
        if told != (ticket.root, len(ticket.tokens), ticket.router, run.prefill_worker):
            raise Conflict("the router's run and the prefill worker's reservation differ")
        if lease.final.tokens_digest != tokens_digest(ticket.tokens):
            raise Conflict("the KV that was handed over is of other tokens")
        first = lease.final.first
        if first.index != len(ticket.delivered) or len(first.ids) != (first.finish is None):
            raise Conflict("the final frame's first token is not the answer's next one")
        if not all(0 <= token < self._pins[0].version.config.vocab_size for token in first.ids):
            raise Corrupt("the final frame's first token is outside the vocabulary")
        return run, lease, lease.final

    async def _decode(self, run: DecodeRun, lease: PageLease, final: KvFinal) -> None:
        if final.first.finish:
            return  # prefill ended the answer, and has told the router
        ticket, version = run.ticket, self._pins[0].version
        scope = self._scope(ticket, lease, version)
        sequence = Sequence(
            ticket,
            version,
            self.deadline,
            lease.hold,
            sampled=final.first.ids,
            keys=page_keys(ticket.tokens, scope) if scope else (),
            scope=scope,
            computed=len(ticket.tokens),
        )
        self.next_index = len(ticket.delivered) + len(final.first.ids)
        self._worker.leases.remove(lease)
        self.sequence = sequence
        self._worker.core.submit(sequence)
        with decoding(sequence, self._worker.jobs.metrics):
            await asyncio.shield(self.ended)

    def _scope(self, ticket: Ticket, lease: PageLease, version: Version) -> PrefixScope | None:
        """Of the keys under which others may find its pages. None where they may not: numbers of another compute class
        are not what would be computed here, and a request for its prompt's log-probabilities fills no cache."""
        alike = lease.reserve.compute_class == self._worker.versions.compute_class
        return version.salted(ticket.salt) if alike and ticket.prompt_logprobs is None else None

    async def _free(self) -> None:
        """The lease goes first: from then on no frame is written. Pages only after nothing can write into them."""
        self.closed = True
        self.listening.set()
        if self.lease:
            self._worker.leases.remove(self.lease)
        await cancelled(self._receiver)
        try:
            if self.sequence:
                await self._worker.core.discard(self.sequence)
            elif self.lease:
                await self._worker.core.call(self.lease.hold.release)
        finally:
            for pin in self._pins:
                pin.release()
