"""A worker that is much slower gives answers away: few at a time, for good reason only, and never to and fro."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.decode.balance import EVERY_S, SLOW, Balance
from pdbus.messages.presence import Card, Load

TICK_S, CARD_S = 0.25, 0.5


@dataclass
class Worker:
    """A step takes `base_ms`, and an eighth more for each further answer; what is believed of it follows slowly."""

    id: str
    base_ms: float
    answers: set[int]
    balance: Balance = field(default_factory=Balance)
    believed_ms: float = 0.0
    card: Card | None = None

    def pass_time(self, noise: float = 1.0) -> None:
        real_ms = noise * self.base_ms * (1 + 0.125 * max(len(self.answers) - 1, 0))
        if self.answers:
            for _ in range(max(int(TICK_S * 1e3 / real_ms), 1)):
                self.believed_ms += 0.3 * (real_ms - self.believed_ms) if self.believed_ms else real_ms

    def tell(self) -> None:
        load = Load(running=len(self.answers))
        self.card = Card("decode", self.id, "i", 1, "ready", "m", load=load, step_ms=self.believed_ms)


def simulate(workers: list[Worker], seconds: float, noise: list[float] | None = None) -> list[tuple[float, int, str]]:
    """(when, which answer, to whom) of every move."""
    moves: list[tuple[float, int, str]] = []
    for turn in range(int(seconds / TICK_S)):
        now_s = turn * TICK_S
        for at, worker in enumerate(workers):
            worker.pass_time(noise[(turn + at) % len(noise)] if noise else 1.0)
            if turn % int(CARD_S / TICK_S) == 0:
                worker.tell()
        for worker in workers:
            others = [other.card for other in workers if other is not worker and other.card]
            target = worker.balance.look(worker.believed_ms, len(worker.answers), others, now_s)
            if target is not None:
                worker.balance.given(worker.believed_ms, now_s)
                answer = worker.answers.pop()
                next(other for other in workers if other.id == target.id).answers.add(answer)
                moves.append((now_s, answer, target.id))
    return moves


def made(*workers: tuple[float, int]) -> list[Worker]:
    numbers = iter(range(10**6))
    return [Worker(f"d-{at}", base, {next(numbers) for _ in range(count)}) for at, (base, count) in enumerate(workers)]


def test_equal_workers_move_nothing_however_they_stagger() -> None:
    assert not simulate(made((30, 8), (30, 8), (30, 4)), 120, noise=[0.7, 1.3, 1.0, 0.9, 1.25])


def test_one_slow_moment_moves_nothing() -> None:
    workers = made((30, 4), (30, 4))
    simulate(workers, 5)
    workers[0].base_ms = 300
    moved = simulate(workers, 2.5)
    workers[0].base_ms = 30
    assert not moved + simulate(workers, 60)


def test_a_worker_that_becomes_five_times_slower_gives_away_what_others_do_sooner() -> None:
    workers = made((150, 6), (30, 4), (30, 4))
    moves = simulate(workers, 60)
    assert len(moves) == 6, "all of them"
    assert {to for _, _, to in moves} == {"d-1", "d-2"}
    assert moves[0][0] >= 3
    assert all(later[0] - earlier[0] >= EVERY_S for earlier, later in itertools.pairwise(moves))


def test_idle_workers_that_were_never_measured_are_no_better() -> None:
    assert not simulate(made((300, 4), (30, 0)), 30)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(5, 400), st.integers(0, 12)), min_size=2, max_size=5),
    st.lists(st.floats(0.8, 1.25), min_size=1, max_size=7),
)
def test_it_settles(given_workers: list[tuple[float, int]], noise: list[float]) -> None:
    workers = made(*given_workers)
    before = sum(len(worker.answers) for worker in workers)
    moves = simulate(workers, 90, noise)
    assert sum(len(worker.answers) for worker in workers) == before
    assert not simulate(workers, 60), "nobody is much slower than he would be elsewhere any more"
    by_answer = [answer for _, answer, _ in moves]
    assert all(by_answer.count(answer) <= 2 for answer in by_answer), "none goes to and fro"
    assert SLOW > 1
