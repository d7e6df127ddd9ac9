"""The engine's thread: turns of the scheduler, one after another, apart from the event loop.

Page table, scheduler and running sequences belong to this thread alone. The event loop reaches them by work that runs
between two turns, and hears of them by lists of events (engine/hearing.py).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from types import TracebackType
from typing import Self, TypeVar

from pdbus.engine.arriving import Arriving, Late
from pdbus.engine.chunks import Chunk, prompt_tokens, wait_for
from pdbus.engine.hearing import Hearing
from pdbus.engine.progress import Progress
from pdbus.engine.scheduler import Limits, Scheduler
from pdbus.engine.sequence import Ended, Event, Produced, Sequence, Started
from pdbus.engine.step import Abandoned, compute
from pdbus.engine.swap import Swap
from pdbus.engine.work import ThreadWork
from pdbus.errors import Cancelled, PdbusError
from pdbus.kv.codec import PagePool
from pdbus.kv.pages import PageTable
from pdbus.kv.swap_file import SwapFile
from pdbus.messages.common import Digest

log = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_S = 0.2
"""An idle engine looks at its deadlines, and shows that it lives, this often."""


class Core:
    """Runs the engine's thread while entered. `on_events` is called in the event loop, in order.

    `on_failure` is called there once, should the thread die of an error; nothing is computed any more after it.
    `swap`: keeps what is preempted; it has to live longer."""

    def __init__(
        self,
        pool: PagePool,
        limits: Limits,
        on_events: Callable[[list[Event]], None],
        on_failure: Callable[[BaseException], None],
        swap: SwapFile | None = None,
    ) -> None:
        self.pool = pool
        self.progress = Progress()
        self.busy = False
        """The last turn computed something."""
        self._work = ThreadWork()
        keeper = Swap(pool, swap, self._work.wake) if swap else None
        self._scheduler = Scheduler(PageTable(pool.pages), limits, keeper, pool.copy_below)
        self._hearing = Hearing(self._work, on_events, on_failure)
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._hearing.start(self._loop)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._work.stop()
        while self._thread.is_alive() and not self._given_up:
            await asyncio.to_thread(self._thread.join, 0.1)

    @property
    def pages(self) -> PageTable:
        """To be read from anywhere, and changed only by work that is given to `call` or `post`."""
        return self._scheduler.pages

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def step_s(self) -> float:
        """As the scheduler's."""
        return self._scheduler.step_s

    @property
    def preempted(self) -> int:
        return len(self._scheduler.preempted)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def live(self) -> int:
        """Sequences that it has not let go of."""
        return self._hearing.live

    async def call(self, work: Callable[[], T]) -> T:
        """Runs `work` in the engine's thread between two turns, and returns or raises what it does. It is done also
        where nobody waits for its result any more."""
        return await self._work.call(work)

    def post(self, work: Callable[[], object]) -> None:
        """Runs `work` in the engine's thread between two turns; it must not raise."""
        self._work.post(work)

    def submit(self, sequence: Sequence) -> None:
        """Hands the sequence and its hold to the engine. Exactly one `Ended` will tell that it has let go of it. Raises
        Unavailable where the engine has stopped."""
        self._hearing.expect(sequence)
        self.post(lambda: self._scheduler.add(sequence))

    def resume(self, sequence: Sequence, computed: int) -> None:
        """The event loop has filled pages of a sequence that was not ready: its first `computed` tokens are there."""

        def resume() -> None:
            sequence.filled(computed)
            self._scheduler.publishing.publish(sequence)

        self.post(resume)

    def resume_early(self, sequence: Sequence, computed: int, arriving: Arriving) -> None:
        """As `resume`, which has to follow, while some of these tokens are still on their way."""
        self.post(lambda: sequence.arrive(computed, arriving))

    def cancel(self, sequence: Sequence) -> None:
        """Ends the sequence as soon as it can be: also in mid-pass, where the pass serves only cancelled ones."""
        sequence.cancelled = True
        self._work.wake()

    def give_up(self, error: BaseException) -> None:
        """The thread hangs, and isn't waited for any more, as if it had died of `error`. For a process that ends."""
        self._given_up = True
        self._work.abandon()
        self._hearing.end(error)

    async def ended(self, sequence: Sequence) -> None:
        """Returns when the engine has let go of the sequence; at once where it has it no longer."""
        await self._hearing.ended(sequence)

    async def discard(self, sequence: Sequence) -> None:
        """Ends the sequence, whatever its state, and frees its pages. Safe to repeat."""
        self.cancel(sequence)
        await self.ended(sequence)
        await self.call(sequence.hold.release)

    # What follows runs in the engine's thread.

    def make_room(self, tenant: str, priority: int, pages: int, *, interrupted: bool = False) -> bool:
        """Whether so many pages can be had for a new sequence of the tenant (engine/scheduler.py)."""
        room = self._scheduler.make_room(tenant, priority, pages, interrupted=interrupted)
        return room and self._scheduler.can_allocate(pages)

    def drop_root(self, kv_root: Digest) -> int:
        """Drops all pages made from it, and publishes none of those that running sequences still compute."""
        return self._scheduler.drop_root(kv_root)

    def _run(self) -> None:
        failure: BaseException | None = None
        self.progress.begin("turn", time.monotonic())
        try:
            while self._work.do(0.0 if self.busy else _IDLE_S):
                self.progress.begin("turn", time.monotonic())
                self.busy = self._turn()
                self.progress.made(time.monotonic())
        except BaseException as error:  # the service has to hear of it, whatever it was
            log.exception("the engine's thread died")
            failure = error
        self.progress.waits = True
        self._work.end()
        self._loop.call_soon_threadsafe(self._hearing.end, failure)

    def _turn(self) -> bool:
        """One turn; whether anything was computed."""
        scheduler = self._scheduler
        events: list[Event] = []
        for sequence in [one for one in scheduler.all if one.cancelled]:
            events.append(self._end(sequence, Cancelled("cancelled")))
        turn = scheduler.turn(time.monotonic())
        events += [self._end(sequence, error) for sequence, error in turn.failed]
        events += [Started(one, one.computed, one.resumed) for one in turn.started]
        self._hearing.tell(events)
        # All passes of a turn are told together: one token frame leaves per turn and router.
        started_s = time.monotonic()
        self._hearing.tell([event for group in turn.groups for event in self._compute(group)])
        if turn.groups and not any(chunk.sequence.cancelled for group in turn.groups for chunk in group):
            scheduler.took(turn, time.monotonic() - started_s)
        return bool(turn.groups)

    def _compute(self, group: Many[Chunk]) -> list[Event]:
        early = [chunk for chunk in group if chunk.sequence.arriving]

        def on_layer(layer: int) -> None:
            self.progress.made(time.monotonic())
            if self._work.stopping or all(chunk.sequence.cancelled for chunk in group):
                raise Abandoned
            if early:
                self.progress.waits = True
                wait_for(early, layer)
                self.progress.goes_on(time.monotonic())
            self._hearing.tell([one.layer_ready(layer) for one in group if one.sequence.handoff and one not in early])

        self._hearing.tell(
            [one.layer_ready(at) for one in group for at in range(one.first_layer) if one.sequence.handoff]
        )
        try:
            # A step of a few tokens ends sooner than the wait for Python's lock in each layer might take.
            reads = prompt_tokens(group) > self._scheduler.limits.page_tokens
            watched = reads or early or any(chunk.sequence.handoff for chunk in group)
            kind, size = ("layer", sum(chunk.tokens for chunk in group)) if watched else ("step", 1)
            uses = [chunk.sequence.ticket.root for chunk in group]
            self.progress.begin(kind, time.monotonic(), size=size, uses=uses)
            outcomes = compute(self.pool, group, on_layer if watched else None)
            self.progress.made(time.monotonic())
            self.progress.begin("turn", time.monotonic())
        except (Abandoned, Late):  # nothing was counted as computed; the next turn removes what was cancelled
            for chunk in early:
                chunk.sequence.set_back()
            return []
        except Exception as error:
            log.exception("a forward pass failed")
            failure = PdbusError(f"the engine failed: {type(error).__name__}")
            return [self._end(chunk.sequence, failure) for chunk in group]
        for chunk in early:  # now that it will not be taken back
            chunk.sequence.arriving = None
            if chunk.sequence.handoff:
                self._hearing.tell([chunk.layer_ready(layer) for layer in range(self.pool.format.layers)])
        for chunk in group:
            self._scheduler.computed(chunk)
        return [event for outcome in outcomes for event in self._events(outcome)]

    def _events(self, outcome: Produced | Ended) -> list[Event]:
        if isinstance(outcome, Ended):
            return [self._end(outcome.sequence, outcome.error)]
        over = outcome.finish or outcome.sequence.handoff
        return [outcome, self._end(outcome.sequence)] if over else [outcome]

    def _end(self, sequence: Sequence, error: PdbusError | None = None) -> Ended:
        self._scheduler.remove(sequence)
        if sequence.ready and not sequence.handoff:  # else somebody may still read or write its pages
            sequence.hold.release()
        return Ended(sequence, error)
