"""When pages run out the youngest wait and lose nothing; everything ends, and nothing is leaked."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.engine.chunks import Turn
from pdbus.engine.scheduler import Limits, Scheduler
from pdbus.engine.sequence import Sequence
from pdbus.errors import DeadlineExceeded, Overloaded
from pdbus.kv.pages import PageTable
from tests.support.sequences import sequence

PAGE = 4


class Shelf:
    """Keeps what was computed, as so many tokens; brings it at the second asking."""

    def __init__(self, pages: int = 1000) -> None:
        self.room = pages
        self.kept: dict[Sequence, int] = {}
        self.asked: set[Sequence] = set()
        self.restored = 0

    def _size(self, one: Sequence) -> int:
        return -(-self.kept[one] // PAGE)

    def save(self, one: Sequence) -> bool:
        self.kept[one] = one.computed
        if self._size(one) > self.room:
            del self.kept[one]
            return False
        assert len(one.hold.pages) >= self._size(one)
        self.room -= self._size(one)
        return True

    def ready(self, one: Sequence) -> bool:
        known = one in self.asked
        self.asked.add(one)
        return known

    def restore(self, one: Sequence) -> None:
        assert self.kept[one] == one.computed
        assert len(one.hold.pages) * PAGE >= len(one.tokens)
        self.restored += 1
        self.drop(one)

    def drop(self, one: Sequence) -> None:
        self.room += self._size(one)
        del self.kept[one]
        self.asked.discard(one)


def scheduler(pages: int, shelf: Shelf | None, running: int = 8) -> Scheduler:
    return Scheduler(PageTable(pages), Limits(PAGE, 16, running), shelf)


def step(plan: Scheduler, now_s: float = 0.0) -> Turn:
    turn = plan.turn(now_s)
    for group in turn.groups:
        for chunk in group:
            last = chunk.last
            plan.computed(chunk)
            if last and chunk.sequence.append(7):
                plan.remove(chunk.sequence)
                chunk.sequence.hold.release()
    return turn


def test_the_youngest_waits_and_goes_on_where_it_was() -> None:
    shelf = Shelf()
    plan = scheduler(5, shelf)
    old, young = sequence(plan.pages, [1] * 7, 8), sequence(plan.pages, [2] * 7, 6)
    plan.add(old)
    plan.add(young)
    seen = set()
    for _ in range(40):
        assert step(plan).failed == ()
        seen |= {len(plan.preempted)}
        plan.pages.check([one.hold for one in plan.running])
    assert seen == {0, 1}
    assert (len(old.tokens), len(young.tokens), shelf.restored) == (15, 13, 1)
    assert (plan.pages.used, shelf.kept, plan.all) == (0, {}, [])


def test_without_room_for_it_the_youngest_fails_as_before() -> None:
    plan = scheduler(5, Shelf(pages=1))
    old, young = sequence(plan.pages, [1] * 7), sequence(plan.pages, [2] * 7)
    plan.add(old)
    plan.add(young)
    failed = [pair for _ in range(4) for pair in step(plan).failed]
    assert [one for one, _ in failed] == [young]
    assert isinstance(failed[0][1], Overloaded)
    assert young.hold.released


def test_one_that_is_alone_is_not_taken_away_from_itself() -> None:
    plan = scheduler(2, Shelf())
    alone = sequence(plan.pages, [1] * 7)
    plan.add(alone)
    failed = [pair for _ in range(4) for pair in step(plan).failed]
    assert [(one, type(error)) for one, error in failed] == [(alone, Overloaded)]


def test_one_that_is_alone_waits_for_pages_that_are_promised_to_another() -> None:
    plan = scheduler(3, Shelf())
    lease = plan.pages.hold()
    lease.allocate(1)
    alone = sequence(plan.pages, [1] * 7, 3)
    plan.add(alone)
    for _ in range(6):
        assert step(plan).failed == ()
    assert plan.preempted == [alone]
    lease.release()
    while plan.all:
        assert step(plan).failed == ()
    assert len(alone.tokens) == 10


def test_pages_that_the_event_loop_uses_are_never_taken() -> None:
    plan = scheduler(5, Shelf())
    old = sequence(plan.pages, [1] * 7)
    handing = sequence(plan.pages, [2] * 5, handoff=True, ready=False)
    plan.add(old)
    plan.add(handing)
    for _ in range(8):
        assert all(one is not handing for one in plan.preempted)
        step(plan)
    assert not handing.hold.released


def test_preempted_ones_come_back_before_new_ones_are_admitted_and_keep_their_order() -> None:
    shelf = Shelf()
    plan = scheduler(6, shelf)
    first, second, third = (sequence(plan.pages, [number] * 7, 10) for number in range(3))
    for one in (first, second, third):
        plan.add(one)
    while not plan.preempted:
        step(plan)
    late = sequence(plan.pages, [9] * 3, 2)
    plan.add(late)
    while plan.all:
        away = set(shelf.kept)
        turn = step(plan)
        assert late not in turn.started or not away & set(shelf.kept)
        assert plan.running == sorted(plan.running, key=lambda one: one.admitted)
    assert [len(one.tokens) for one in (first, second, third, late)] == [17, 17, 17, 5]


def test_an_interrupted_one_takes_room_that_is_too_little_for_those_that_are_preempted() -> None:
    """Somebody waits for its next token, too; whoever has none yet waits for all of them."""
    shelf = Shelf()
    plan = scheduler(8, shelf)
    old, young = sequence(plan.pages, [1] * 3, 30), sequence(plan.pages, [2] * 19, 8)
    plan.add(old)
    plan.add(young)
    while not plan.preempted:
        step(plan)
    new, interrupted = sequence(plan.pages, [3] * 3, 2), sequence(plan.pages, [4] * 3, 2)
    interrupted.ticket = replace(interrupted.ticket, delivered=(9,))
    plan.add(new)
    plan.add(interrupted)
    assert step(plan).started == (interrupted,)
    assert plan.preempted == [young]
    while plan.all:
        away = list(plan.preempted)
        assert new not in step(plan).started or not away or not plan.preempted


def test_a_preempted_one_ends_at_its_deadline_or_when_it_is_removed() -> None:
    shelf = Shelf()
    plan = scheduler(8, shelf)
    all_three = [sequence(plan.pages, [number] * 7, deadline_s=9.0 - number) for number in range(3)]
    for one in all_three:
        plan.add(one)
    while len(plan.preempted) < 2:
        step(plan)
    assert plan.preempted == all_three[1:]
    ((late, error),) = step(plan, 7.5).failed
    assert (late, type(error)) == (all_three[2], DeadlineExceeded)
    assert plan.remove(all_three[1])
    assert (shelf.kept, plan.preempted) == ({}, [])


def test_nobody_gives_way_where_that_would_not_be_enough() -> None:
    """Else it would go and come back in each turn, and nobody would win anything."""
    shelf = Shelf()
    plan = scheduler(15, shelf)
    first, other, low = of_priority(plan, 5, 22), of_priority(plan, 5, 3), of_priority(plan, 0, 7)
    for one in (first, other, low):
        plan.add(one)
    while low.remaining > 1:
        step(plan)
    urgent = of_priority(plan, 5, 40)
    plan.add(urgent)
    for _ in range(5):
        step(plan)
        assert (plan.preempted, low in plan.running, urgent in plan.waiting) == ([], True, True)
    plan.remove(first)
    first.hold.release()
    assert urgent in step(plan).started
    assert plan.preempted == [low]


def test_one_that_is_alone_gives_way_to_a_higher_priority_and_comes_back() -> None:
    plan = scheduler(10, Shelf())
    low, urgent = of_priority(plan, 0, 30), of_priority(plan, 5, 20)
    urgent.ticket = replace(urgent.ticket, max_tokens=4)
    plan.add(low)
    while low.remaining > 1:
        step(plan)
    plan.add(urgent)
    assert urgent in step(plan).started
    assert plan.preempted == [low]
    while urgent in plan.running:
        step(plan)
    for _ in range(3):
        step(plan)
    assert plan.running == [low]


def of_priority(plan: Scheduler, priority: int, length: int) -> Sequence:
    one = sequence(plan.pages, [priority] * length)
    one.ticket = replace(one.ticket, priority=priority)
    return one


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=10),
    pages=st.integers(15, 25),
    shelf_pages=st.integers(0, 40),
    running=st.integers(1, 8),
)
def test_everything_ends_and_nothing_is_leaked(
    prompts: list[tuple[int, int]], pages: int, shelf_pages: int, running: int
) -> None:
    shelf = Shelf(shelf_pages)
    plan = scheduler(pages, shelf, running)
    sequences = [sequence(plan.pages, [at] * length, most) for at, (length, most) in enumerate(prompts)]
    for one in sequences:
        plan.add(one)
    failed: list[Sequence] = []
    for _ in range(2000):
        if not plan.all:
            break
        failed += [one for one, _ in step(plan).failed]
        plan.pages.check([one.hold for one in plan.running])
    assert plan.all == []
    assert (plan.pages.used, shelf.kept, shelf.room) == (0, {}, shelf_pages)
    if shelf_pages >= 10 * 15:
        assert failed == []
    for one, (length, most) in zip(sequences, prompts, strict=True):
        assert one in failed or len(one.tokens) == length + most
