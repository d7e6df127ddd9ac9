"""The state machine of decode/moving.py, driven by hypothesis over everything that may be lost, doubled, late or dead.

Real are the parts that guard the tokens: the workers' outbox and attempts, the router's reordering. The engine, the
bus and the pages are a model: the text is a function of the position, frames lie in a bag from which any may be taken
next, taken twice, or dropped; source, target and router may die in any state.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdbus.engine.attempts import Attempts
from pdbus.engine.outbox import Outbox
from pdbus.errors import PdbusError
from pdbus.messages.router import TokenFrame, TokenItem
from pdbus.messages.workers import Cancel, Resend
from pdbus.router.reorder import InOrder

LENGTH = 40
PAGE = 4
ROOT, OTHER_ROOT = b"r" * 32, b"o" * 32
WORKERS = ("a", "b", "c")
LEASE_S = 5.0


def token(position: int) -> int:
    """The text that an undisturbed answer has."""
    return 1000 + position * 7 % 31


def item(attempt: int, index: int, ids: tuple[int, ...], root: bytes = ROOT) -> TokenItem:
    return TokenItem("q", 0, attempt, root, index, ids)


@dataclass
class Worker:
    """What a decode worker holds: at most one attempt of the session, and pages kept for one that is to come."""

    id: str
    incarnation: int = 0
    alive: bool = True
    deaf: bool = False
    """Stopped: it neither hears nor says anything, and goes on later as if nothing had been."""
    outbox: Outbox = field(init=False)
    attempts: Attempts = field(default_factory=Attempts)
    attempt: int = 0
    """0: it writes nothing."""
    written: int = 0
    guest_until_s: float = 0.0
    moving: bool = False
    brought: int = 0
    """Pages that the target of its move has."""

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.id, str(self.incarnation))

    @property
    def works(self) -> bool:
        return self.alive and not self.deaf

    def stop(self) -> None:
        self.attempt, self.moving, self.brought = 0, False, 0


class Moves(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.now_s = 0.0
        self.workers = {name: Worker(name) for name in WORKERS}
        self.frames: list[TokenFrame] = []
        self.delivered: list[int] = []
        self.attempt = 0
        self.order = InOrder(0)
        self.at = ""
        self.router_alive = True
        self.over = False
        self._begin("a")

    # The router

    def _begin(self, worker: str) -> None:
        """The next attempt, with what was delivered as a forced prefix. Nobody needs to take it."""
        self.attempt += 1
        self.order = InOrder(len(self.delivered))
        self.at = worker
        target = self.workers[worker]
        if not target.works:
            return
        try:
            taken = target.attempts.admit("q", 0, "q-0", self.attempt, self.now_s)
        except PdbusError:
            return
        assert taken, "an attempt's number is used once"
        target.stop()
        target.attempt, target.written, target.guest_until_s = self.attempt, len(self.delivered), 0.0

    def _deliver(self, one: TokenItem) -> None:
        if not self.router_alive or self.over or one.attempt != self.attempt or one.root != ROOT:
            return
        for ready in self.order.add(one):
            if ready.finish == "moved":
                self._cancel(one.attempt, self.at)
                self._begin(ready.moved_to or self.at)
                return
            self.delivered += ready.ids
            if ready.finish == "length":
                self.over = True
                self._cancel(one.attempt, self.at)
                return

    def _cancel(self, attempt: int, worker: str) -> None:
        known = self.workers[worker]
        if known.works:
            message = Cancel("q", attempt, "r", (worker,), 0, "superseded")
            known.attempts.cancel(message, self.now_s)
            known.outbox.acknowledge(message)
            if known.attempt and known.attempt <= attempt:
                known.stop()

    @precondition(lambda self: self.router_alive and not self.over)
    @rule()
    def router_asks_again(self) -> None:
        """Silence: a resend, or nobody is there, and the next attempt goes elsewhere."""
        holder = self.workers[self.at]
        if not holder.works:
            self._give_up()
            return
        reply = holder.outbox.resend(Resend("q", 0, self.attempt, self.order.next_index))
        running = holder.attempt == self.attempt
        before = (self.attempt, self.order.next_index)
        for one in reply.items:
            self._deliver(one)
        if before == (self.attempt, self.order.next_index) and reply.state != "running" and not running:
            self._give_up()

    def _give_up(self) -> None:
        self._cancel(self.attempt, self.at)
        others = [name for name in WORKERS if name != self.at]
        self._begin(others[self.attempt % 2])

    @rule()
    def router_dies(self) -> None:
        self.router_alive = False

    # The bus

    @precondition(lambda self: self.frames)
    @rule(data=st.data(), keep=st.booleans(), lost=st.booleans())
    def a_frame_arrives(self, data: st.DataObject, keep: bool, lost: bool) -> None:
        """Any of those under way; it may come once more, or never."""
        at = data.draw(st.integers(0, len(self.frames) - 1))
        frame = self.frames[at] if keep else self.frames.pop(at)
        if lost:
            return
        for one in frame.items:
            self._deliver(one)
            stale = one.attempt < self.attempt or self.over
            if self.router_alive and stale and one.finish is None:
                self._cancel(one.attempt, frame.worker)

    @precondition(lambda self: self.frames)
    @rule(data=st.data())
    def a_frame_of_another_root_arrives(self, data: st.DataObject) -> None:
        frame = data.draw(st.sampled_from(self.frames))
        for one in frame.items:
            self._deliver(replace(one, root=OTHER_ROOT, ids=(1,), finish=None, moved_to=None))

    # Workers

    def _send(self, worker: Worker, one: TokenItem) -> None:
        worker.outbox.put("r", one, self.now_s)
        self.frames += [frame for _, frame in worker.outbox.take()]

    @rule(name=st.sampled_from(WORKERS))
    def a_step(self, name: str) -> None:
        worker = self.workers[name]
        if not worker.works or not worker.attempt:
            return
        last = worker.written + 1 >= LENGTH
        one = item(worker.attempt, worker.written, (token(worker.written),))
        worker.written += 1
        self._send(worker, replace(one, finish="length") if last else one)
        if last:
            worker.outbox.close("q", 0, worker.attempt, self.now_s)
            worker.stop()

    @rule(name=st.sampled_from(WORKERS), to=st.sampled_from(WORKERS))
    def pages_are_brought(self, name: str, to: str) -> None:
        source, target = self.workers[name], self.workers[to]
        if source.works and source.attempt and target.works and name != to:
            source.moving, source.brought = True, source.written // PAGE
            target.guest_until_s = self.now_s + LEASE_S

    @rule(name=st.sampled_from(WORKERS), to=st.sampled_from(WORKERS))
    def it_leaves(self, name: str, to: str) -> None:
        """Between two steps, if the target has all full pages. Whether that still lives is not known here."""
        source = self.workers[name]
        if not source.works or not source.moving or source.brought < source.written // PAGE or name == to:
            return
        self._send(source, replace(item(source.attempt, source.written, ()), finish="moved", moved_to=to))
        source.outbox.close("q", 0, source.attempt, self.now_s)
        source.stop()

    @rule(name=st.sampled_from(WORKERS))
    def a_worker_dies(self, name: str) -> None:
        """And is started again at some time: another life knows nothing."""
        old = self.workers[name]
        self.workers[name] = Worker(name, old.incarnation + 1, alive=False)

    @rule(name=st.sampled_from(WORKERS))
    def a_worker_starts(self, name: str) -> None:
        self.workers[name].alive = True

    @rule(name=st.sampled_from(WORKERS))
    def a_worker_is_stopped_or_goes_on(self, name: str) -> None:
        self.workers[name].deaf = not self.workers[name].deaf

    @rule(seconds=st.floats(0.1, 6.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for worker in self.workers.values():
            if worker.works and worker.guest_until_s <= self.now_s:
                worker.guest_until_s = 0.0
            if worker.works and not self.router_alive:
                worker.stop()  # it has missed the router's presence

    @invariant()
    def every_token_once_in_order_and_of_one_root(self) -> None:
        if hasattr(self, "delivered"):
            assert self.delivered == [token(position) for position in range(len(self.delivered))]

    @invariant()
    def at_most_one_worker_writes_the_newest_attempt(self) -> None:
        if hasattr(self, "workers"):
            assert sum(worker.attempt == self.attempt for worker in self.workers.values()) <= 1

    def teardown(self) -> None:
        """Left alone, the answer becomes whole, and nothing stays held."""
        if not hasattr(self, "workers"):
            return
        for worker in self.workers.values():
            worker.alive, worker.deaf = True, False
        while self.router_alive and not self.over:
            before = len(self.delivered)
            for name in WORKERS:
                self.a_step(name)
            self.router_asks_again()
            while self.frames:
                for one in (frame := self.frames.pop(0)).items:
                    self._deliver(one)
                    if (one.attempt < self.attempt or self.over) and one.finish is None:
                        self._cancel(one.attempt, frame.worker)
            assert self.over or len(self.delivered) >= before
        if self.over:
            assert self.delivered == [token(position) for position in range(LENGTH)]
        for name in WORKERS:  # late writers hear that nobody wants what they write
            self.a_step(name)
            for frame in self.frames:
                for one in frame.items:
                    self._cancel(one.attempt, frame.worker)
        self.now_s += LEASE_S
        self.time_passes(LEASE_S)
        assert not any(worker.attempt or worker.guest_until_s for worker in self.workers.values())


Moves.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestMoves = Moves.TestCase
