"""Live migration: answers that are being written here go on at another decode worker.

The states of one move, and what the death of any party in each of them costs:

    writing     the source writes on. It tells the target which full pages there are (Adopt), and the target fetches
                those that it lacks; again and again, until it has them all.
                    Source dies: as ever, the next attempt goes on from what was delivered; the target, whose pages
                    routers know of, is a good place for it. Target dies or refuses: the move is off, nothing happened.
    left        between two steps, and only if the target has all pages that are full by then, the engine lets go of the
                sequence. Its last item is `moved`, with the next output index: it follows the answer's last token.
                    Lost: the router asks again (the outbox has it), as for any token. Source dies: as above.
    continued   the router, once it has delivered every token before it, makes the next attempt, at the target. This is
                an attempt like any other: the ids delivered are a forced prefix, of which at most the last page has to
                be computed, all others are found under their prefix keys.
                    Target dies or refuses: the next attempt goes elsewhere. Router dies: nobody asks for the answer,
                    and the pages' lease at the target ends.

So nothing new guards the tokens: attempt numbers fence late frames, output indices order them and drop doubled ones,
and root, compute class, page format and tenant salt are in the keys by which pages are found.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdbus.context import RequestContext
from pdbus.decode.balance import Balance
from pdbus.decode.local import LocalJob
from pdbus.engine.sequence import Key, Sequence
from pdbus.errors import NotFound, PdbusError, Unavailable
from pdbus.kv.codec import export_page
from pdbus.kv.prefix import PageKey
from pdbus.messages.bulk import CacheHead
from pdbus.messages.common import Digest
from pdbus.messages.decode import Adopt, PagesFound, PagesWanted
from pdbus.messages.presence import Card
from pdbus.subjects import DECODE_ADOPT, transfer_to

if TYPE_CHECKING:
    from pdbus.decode.job import DecodeJob
    from pdbus.decode.worker import DecodeWorker

log = logging.getLogger(__name__)

AT_ONCE = 4
_ADOPT_S = 20.0
"""For all pages of a long answer; meanwhile it is written on here."""
_MOST_ROUNDS = 16
"""A prompt that is being read fills pages faster than they travel: then the target computes the last ones."""
_AGAIN_S = 0.5
"""After a move that came to nothing."""
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Needs:
    """What an answer asks of a worker that it moves to."""

    model: str
    root: Digest
    page_format: str
    compute_class: str
    pages: int


def fitting(cards: Iterable[Card], needs: Needs) -> list[Card]:
    """Those of these live decode workers' cards to which it can move. Pure."""
    wanted = (needs.model, needs.page_format, needs.compute_class)
    return [
        card
        for card in cards
        if card.state == "ready"
        and (card.model, card.page_format, card.compute_class) == wanted
        and needs.root in card.roots
        and card.load.pages_total - card.load.pages_used >= needs.pages
    ]


class Mover:
    """Of one worker; used from the event loop."""

    def __init__(self, worker: DecodeWorker) -> None:
        self.moved = 0
        """Answers that went on elsewhere, since the start."""
        self._worker = worker
        self._keys: dict[Key, tuple[PageKey, ...]] = {}
        """Of the pages that each moving answer's target may fetch."""
        self._given: dict[str, tuple[int, int]] = {}
        """Answers that were given to a worker since its card of this sequence number."""
        self._balance = Balance()
        self._rng = random.Random()  # noqa: S311 - ties

    async def empty(self) -> None:
        """Returns when no job is left. Bounded by the caller."""
        jobs = self._worker.jobs
        while len(jobs):
            for job in jobs:
                if isinstance(job, LocalJob) and job.unread:
                    job.stop(Unavailable(f"worker {self._worker.id} is draining"))
            now_s = time.monotonic()
            movable = [job for job in jobs if self._movable(job) and job.stays_until_s <= now_s]
            if movable:
                await asyncio.gather(*(self.move(job) for job in movable[:AT_ONCE]))
            elif tasks := [job.task for job in jobs]:
                await asyncio.wait(tasks, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)

    def rebalance(self, now_s: float) -> None:
        """Begins to move an answer away where this worker is much slower than others."""
        core, jobs = self._worker.core, list(self._worker.jobs)
        movable = [job for job in jobs if self._movable(job) and job.stays_until_s <= now_s]
        if not movable or any(job.moving_to for job in jobs):
            return
        job = min(movable, key=lambda job: len(job.sequence.hold.pages) if job.sequence else 0)
        assert job.sequence
        step_ms = core.step_s * 1e3
        target = self._balance.look(step_ms, core.running, self._fitting(job.sequence), now_s)
        if target is not None:
            log.info("a step takes %.0f ms here and %.0f ms at %s: an answer moves", step_ms, target.step_ms, target.id)
            self._balance.given(step_ms, now_s)
            self._worker.jobs.spawn(self._move_later(job, target.id))

    async def _move_later(self, job: DecodeJob | LocalJob, to: str) -> None:
        await self.move(job, to)

    async def move(self, job: DecodeJob | LocalJob, to: str | None = None) -> bool:
        """Moves the answer to that worker, or to the one that has least to do. False: it is written on here."""
        sequence = job.sequence
        if sequence is None or not self._movable(job):
            return False
        target = to or self._target(sequence)
        if target is None:
            job.stays_until_s = time.monotonic() + _AGAIN_S
            return False
        job.moving_to = target
        left = False
        try:
            left = await self._bring(sequence, job.attempt, target)
        except PdbusError as error:
            log.info("attempt %s does not move to %s: %s", job.key, target, error.message)
        finally:
            self._keys.pop(job.key, None)
            if not left:
                job.moving_to = None
                job.stays_until_s = time.monotonic() + _AGAIN_S
        if left:
            self.moved += 1
            await asyncio.wait([job.ended])
        return left

    async def send_pages(self, message: PagesWanted, ctx: RequestContext) -> PagesFound:
        """What a target asks for. Raises NotFound."""
        core, jobs = self._worker.core, self._worker.jobs
        keys = self._keys.get((message.session, message.attempt), ())
        wanted = keys[message.first : message.end]
        if not 0 <= message.first < message.end <= len(keys):
            raise NotFound(f"attempt {message.attempt} of {message.session} does not move from here")
        hold = core.pages.hold()
        found = await core.call(lambda: hold.match(wanted))
        if found < len(wanted):
            core.post(hold.release)
            raise NotFound("a page of the answer is gone")

        async def send() -> None:
            try:
                to = transfer_to(message.receiver, message.stream)
                async with self._worker.bus.bulk.send(to, ctx.deadline) as out:
                    for index, page in enumerate(hold.pages, message.first):
                        await out.item(CacheHead(index), export_page(self._worker.pool, page))
                        await asyncio.sleep(0)
            except PdbusError as error:
                log.info("pages of %s were not taken: %s", message.session, error.message)
            finally:
                core.post(hold.release)

        jobs.spawn(send())
        return PagesFound()

    async def _bring(self, sequence: Sequence, attempt: int, target: str) -> bool:
        """Until the target has all full pages and the engine has let go of the sequence. Raises PdbusError."""
        core, ticket, version = self._worker.core, sequence.ticket, sequence.version
        brought = 0
        for turn in range(_MOST_ROUNDS):
            keys = sequence.keys[: sequence.published]
            if len(keys) > brought:
                self._keys[sequence.key] = keys
                tokens = tuple(sequence.tokens[: len(keys) * self._worker.pool.format.page_tokens])
                adopt = Adopt(
                    self._worker.id,
                    ticket.request_id,
                    ticket.choice,
                    attempt,
                    ticket.tenant,
                    ticket.root,
                    ticket.salt,
                    tokens,
                    str(version.scope.page_format),
                    self._worker.versions.compute_class,
                )
                ctx = RequestContext(sequence.deadline.within(_ADOPT_S), ticket.request_id, ticket.tenant)
                await self._worker.bus.call(DECODE_ADOPT(worker=target), adopt, ctx)
                brought = len(keys)
            at_most = brought if turn < _MOST_ROUNDS - 1 else 1 << 30
            left = await core.call(lambda most=at_most: sequence.leave(most))  # type: ignore[misc]
            if left is not None:
                return left
        return False

    def _movable(self, job: DecodeJob | LocalJob) -> bool:
        """It is in the engine, which alone writes into its pages; and others may find these."""
        sequence = job.sequence
        idle = job.moving_to is None and not job.stopping and not job.closed and not job.ended.done()
        return idle and sequence is not None and sequence.ready and sequence.admitted > 0 and sequence.scope is not None

    def _fitting(self, sequence: Sequence) -> list[Card]:
        version = sequence.version
        needs = Needs(
            self._worker.model,
            sequence.ticket.root,
            str(version.scope.page_format),
            self._worker.versions.compute_class,
            len(sequence.hold.pages) + 1,
        )
        others = [card for card in self._worker.fleet.live("decode") if card.id != self._worker.id]
        return fitting(others, needs)

    def _target(self, sequence: Sequence) -> str | None:
        chosen = min(self._fitting(sequence), key=self._busy, default=None)
        if chosen is None:
            return None
        seq, given = self._given.get(chosen.id, (chosen.seq, 0))
        self._given[chosen.id] = (chosen.seq, given + 1 if seq == chosen.seq else 1)
        return chosen.id

    def _busy(self, card: Card) -> tuple[int, float]:
        """Its load, and what it was given since it told of that."""
        seq, given = self._given.get(card.id, (0, 0))
        return card.load.running + card.load.waiting + (given if seq == card.seq else 0), self._rng.random()
