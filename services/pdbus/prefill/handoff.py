"""Hands a prompt's KV to its decode worker, layers by layers, while later layers and chunks are still computed; all at
once after the first token, where the computing would wait for it.

What waits to be sent are notes of a few numbers: the KV itself is sent from where it lies in the pool, in pages that
stay with the sequence until the hand-over has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdbus.backoff import backoff_s
from pdbus.bus.bulk_send import Outgoing
from pdbus.bus.codec import encode
from pdbus.checksum import crc32
from pdbus.context import RequestContext
from pdbus.engine.sequence import LayerReady, Sequence
from pdbus.errors import DeadlineExceeded, NotFound, Overloaded, Unavailable
from pdbus.kv.prefix import tokens_digest
from pdbus.messages.bulk import KV_FINAL, KvHead
from pdbus.messages.decode import KvFinal, Lease, Reserve
from pdbus.messages.router import TokenItem
from pdbus.prefill.pieces import Piece, Pieces
from pdbus.subjects import DECODE_RESERVE, KV
from pdbus.telemetry import Phase, record_span

if TYPE_CHECKING:
    from pdbus.prefill.worker import PrefillWorker

_ANSWER_S = 5.0
"""A decode worker grants or refuses a lease within a turn of its engine."""
_AGAIN_S, _ALL_AGAIN_S = 0.02, 0.2
"""At least so long after a refusal it asks again. An interrupted answer does just then, to be there when there is room
and before all others; where there are many of them one does, and each within the longer time: a hundred that asked as
often as one would keep both workers' event loops busy."""
_SHORT = 8
"""So many times as many cached tokens as others: these are computed sooner than those are sent."""
_FEW_CORES = 3
"""A hand-over keeps this worker's event loop, the server and the decode worker at work: where these have no more cores,
and the engine takes them all, it computes no sooner for what is sent meanwhile, and waits besides for each turn of
theirs. All at once costs them less, too."""
_ALIVE = 3
"""So many times within a lease something is sent."""


class Reserving:
    """The hand-overs of one worker that have no lease yet."""

    def __init__(self) -> None:
        self.interrupted = 0
        """Of answers that were begun elsewhere."""

    @contextlib.contextmanager
    def one(self, interrupted: bool) -> Iterator[None]:
        self.interrupted += interrupted
        try:
            yield
        finally:
            self.interrupted -= interrupted


class Handoff:
    """One sequence's. `run` ends when the decode worker has everything; the other methods say what there is to send."""

    def __init__(self, worker: PrefillWorker, sequence: Sequence, decode_worker: str) -> None:
        self._worker, self._sequence, self._decode_worker = worker, sequence, decode_worker
        self._pieces = Pieces(worker.pool.format)
        self._first: TokenItem | None = None
        self._news = asyncio.Event()
        self._known = False
        """It is known how much was cached."""
        self._waits = False
        """No more is sent before the first token than the lease needs to live."""
        self._quiet_s = 0.0
        """So long it may go without."""
        self._sent_s = 0.0
        self._frames = 0
        self._checksum = 0

    def cached(self, tokens: int) -> None:
        """The first `tokens` tokens are in the pages without having been computed. Nothing is sent before this word."""
        self._pieces.cached(tokens)
        self._known = True
        # Where little is left to compute, sending the rest beside it would only make the first token late.
        self._waits |= (len(self._sequence.ticket.tokens) - tokens) * _SHORT <= tokens
        self._news.set()

    def layer_ready(self, event: LayerReady) -> None:
        self._pieces.computed(event.layer, event.start, event.tokens)
        self._news.set()

    def first_token(self, item: TokenItem) -> None:
        """All layers are ready: the final frame carries this item."""
        self._first = item
        self._news.set()

    async def run(self) -> None:
        """Reserves, streams, ends. Raises what the decode worker refused with, Unavailable, DeadlineExceeded."""
        lease = await self._reserve()
        cores = self._worker.cores
        self._waits |= cores is not None and cores.id == lease.cores and cores.cores <= _FEW_CORES
        self._quiet_s, self._sent_s = lease.lease_ms / 1e3 / _ALIVE, time.monotonic()
        ticket = self._sequence.ticket
        subject = KV.name(worker=self._decode_worker, session=ticket.session, attempt=str(ticket.attempt))
        started_ns = time.time_ns()
        try:
            async with self._worker.bus.bulk.send(subject, self._sequence.deadline) as out:
                await self._send_pieces(out)
                await self._send_final(out)
        except NotFound as error:  # the lease ended, and with it the stream
            raise Unavailable(f"decode worker {self._decode_worker}: {error.message}") from None
        attributes = {"pdbus.frames": self._frames, "pdbus.tokens": len(ticket.tokens)}
        record_span(Phase.KV_TRANSFER, started_ns, time.time_ns(), attributes=attributes)

    async def _reserve(self) -> Lease:
        ticket = self._sequence.ticket
        reserve = Reserve(
            ticket.request_id,
            ticket.choice,
            ticket.attempt,
            ticket.router,
            ticket.root,
            len(ticket.tokens),
            self._worker.id,
            str(self._worker.pool.format),
            self._worker.versions.compute_class,
            ticket.deadline_ns,
            ticket.tenant,
            ticket.priority,
            ticket.interrupted,
        )
        with self._worker.reserving.one(reserve.interrupted):
            return await self._granted(reserve)

    async def _granted(self, reserve: Reserve) -> Lease:
        """Asks until there is room."""
        ticket, deadline = self._sequence.ticket, self._sequence.deadline
        rng = random.Random()  # noqa: S311 - jitter
        retries = 0
        while True:
            ctx = RequestContext(deadline.within(_ANSWER_S), ticket.request_id, ticket.tenant)
            try:
                return await self._worker.bus.call(DECODE_RESERVE(worker=self._decode_worker), reserve, ctx)
            except Overloaded:
                retries += 1
                if reserve.interrupted:
                    wait_s = min(_AGAIN_S * self._worker.reserving.interrupted, _ALL_AGAIN_S)
                else:
                    wait_s = _AGAIN_S + backoff_s(retries, rng)
                if deadline.remaining_s <= wait_s:
                    raise
                await asyncio.sleep(wait_s)
            except DeadlineExceeded:
                if deadline.passed:
                    raise
                raise Unavailable(f"decode worker {self._decode_worker} does not answer") from None

    async def _send_pieces(self, out: Outgoing) -> None:
        while True:
            while piece := self._next_piece():
                await self._send_piece(out, piece)
            if self._first and self._known:
                return
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._quiet_s):
                    await self._news.wait()

    def _next_piece(self) -> Piece | None:
        quiet = self._waits and not self._first and time.monotonic() - self._sent_s < self._quiet_s
        return None if quiet or not self._known else self._pieces.take(all=self._first is not None)

    async def _send_piece(self, out: Outgoing, piece: Piece) -> None:
        ticket, pool = self._sequence.ticket, self._worker.pool
        first_page = piece.start // pool.format.page_tokens
        pages = self._sequence.hold.pages[first_page : pool.format.pages_for(piece.start + piece.tokens)]
        body = [pool.lend_bytes(piece.layer + at, pages) for at in range(piece.layers)]
        self._frames += 1
        for layer in body:
            self._checksum = crc32(layer, self._checksum)
        head = KvHead(ticket.attempt, ticket.root, piece.layer, piece.start, piece.tokens, piece.layers)
        await out.item(head, *body)
        self._sent_s = time.monotonic()

    async def _send_final(self, out: Outgoing) -> None:
        ticket = self._sequence.ticket
        assert self._first
        tokens, digest = len(ticket.tokens), tokens_digest(ticket.tokens)
        final = KvFinal(ticket.attempt, ticket.root, tokens, digest, self._frames, self._checksum, self._first)
        await out.item(KvHead(ticket.attempt, ticket.root, KV_FINAL, tokens, 0), encode(final))
