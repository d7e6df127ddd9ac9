"""What is computed when: budgets, page boundaries, sharing, and who gives way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.engine.chunks import Turn
from pdbus.engine.scheduler import Limits, Scheduler
from pdbus.engine.sequence import Sequence
from pdbus.errors import DeadlineExceeded, Overloaded, TooLarge
from pdbus.kv.pages import PageTable
from pdbus.kv.prefix import page_keys
from tests.support.sequences import SCOPE, sequence

PAGE = 4


def scheduler(pages: int = 100, chunk: int = 16, running: int = 8) -> Scheduler:
    return Scheduler(PageTable(pages), Limits(PAGE, chunk, running))


def step(plan: Scheduler, now_s: float = 0.0, taken_s: float = 0.001) -> Turn:
    """A turn, computed in so much time; each sequence at its end gets the next token."""
    turn = plan.turn(now_s)
    for group in turn.groups:
        for chunk in group:
            last = chunk.last
            plan.computed(chunk)
            if last:
                chunk.sequence.append(7)
    plan.took(turn, taken_s)
    return turn


def sizes(turn: Turn) -> list[int]:
    return [chunk.tokens for group in turn.groups for chunk in group]


def test_a_prompt_is_read_in_chunks_and_then_continued_token_by_token() -> None:
    plan = scheduler()
    plan.add(sequence(plan.pages, [1] * 37))
    assert [sizes(step(plan)) for _ in range(5)] == [[16], [16], [5], [1], [1]]


def test_prompts_share_the_budget_and_a_short_one_is_not_held_up() -> None:
    plan = scheduler()
    for length in (100, 5, 100):
        plan.add(sequence(plan.pages, [length] * length))
    assert sizes(step(plan)) == [4, 5, 4]
    assert sizes(step(plan)) == [8, 1, 8]


def test_versions_are_computed_in_passes_of_their_own() -> None:
    plan = scheduler()
    for root in (b"a", b"b", b"a"):
        plan.add(sequence(plan.pages, [1, 2], root=root))
    turn = step(plan)
    assert [[chunk.sequence.ticket.root for chunk in group] for group in turn.groups] == [[b"a", b"a"], [b"b"]]


def test_versions_of_one_kind_share_a_pass_in_which_each_has_its_place() -> None:
    plan, model = scheduler(), SimpleNamespace(kind="one")
    for root, own in ((b"a", model), (b"b", None), (b"c", model), (b"a", model)):
        plan.add(sequence(plan.pages, [1, 2], root=root, model=own))
    turn = step(plan)
    roots = [[chunk.sequence.ticket.root for chunk in group] for group in turn.groups]
    assert roots == [[b"a", b"a", b"c"], [b"b"]]


def test_a_prefix_that_is_being_computed_is_waited_for_and_shared() -> None:
    plan = scheduler(chunk=8)
    first = sequence(plan.pages, list(range(20)), cache=True)
    same = sequence(plan.pages, list(range(20)), cache=True)
    fork = sequence(plan.pages, [*range(8), 99, 98, 97, 96, 95], cache=True)
    other = sequence(plan.pages, [50] * 9, cache=True)
    for one in (first, same, fork, other):
        plan.add(one)
    assert step(plan).started == (first, other)
    assert step(plan).started == ()
    assert step(plan).started == (fork,)  # what they have in common is there
    while same in plan.waiting:
        step(plan)
    assert fork.hold.pages[:2] == first.hold.pages[:2]
    assert same.hold.pages[:5] == first.hold.pages[:4] + same.hold.pages[4:5]
    assert same.hold.pages[4] != first.hold.pages[4]


def test_when_the_computing_one_goes_the_next_takes_over() -> None:
    plan = scheduler(chunk=4)
    first, same = (sequence(plan.pages, list(range(20)), cache=True) for _ in range(2))
    plan.add(first)
    plan.add(same)
    step(plan)
    plan.remove(first)
    first.hold.release()
    turn = step(plan)
    assert turn.started == (same,)
    assert same.computed == 4 + 4  # a page was there already


def test_the_last_token_is_always_computed() -> None:
    plan = scheduler()
    plan.add(sequence(plan.pages, list(range(16)), cache=True))
    step(plan)
    again = sequence(plan.pages, list(range(16)), cache=True)
    plan.add(again)
    assert sizes(step(plan)) == [1, 4]


def test_a_large_prompt_is_not_overtaken_for_ever() -> None:
    plan = scheduler(pages=11)
    small = sequence(plan.pages, [1] * 20)
    large, behind = sequence(plan.pages, [2] * 36), sequence(plan.pages, [3] * 4)
    for one in (small, large, behind):
        plan.add(one)
    assert step(plan).started == (small,)
    plan.remove(small)
    small.hold.release()
    assert step(plan).started == (large, behind)


def test_what_can_never_fit_is_refused() -> None:
    plan = scheduler(pages=3)
    large = sequence(plan.pages, [1] * 13)
    plan.add(large)
    ((failed, error),) = step(plan).failed
    assert failed is large
    assert isinstance(error, TooLarge)


def test_a_sequence_that_is_not_ready_keeps_its_pages_and_is_not_computed() -> None:
    plan = scheduler()
    held = sequence(plan.pages, [1] * 12, ready=False)
    plan.add(held)
    assert (step(plan).groups, len(held.hold.pages)) == ((), 3)
    held.computed, held.ready = 8, True
    assert sizes(step(plan)) == [4]


def test_the_youngest_gives_way_when_pages_run_out() -> None:
    plan = scheduler(pages=5)
    old, young = sequence(plan.pages, [1] * 7), sequence(plan.pages, [2] * 7)
    plan.add(old)
    plan.add(young)
    failed: list[Sequence] = []
    for _ in range(4):
        for one, error in step(plan).failed:
            assert isinstance(error, Overloaded)
            assert one.hold.released
            failed.append(one)
    assert failed == [young]
    assert len(old.hold.pages) == 3


def test_deadlines_are_looked_at_in_every_turn() -> None:
    plan = scheduler(running=1)
    late, queued = sequence(plan.pages, [1] * 4, deadline_s=5.0), sequence(plan.pages, [1] * 4, deadline_s=4.0)
    plan.add(late)
    plan.add(queued)
    assert step(plan, 3.9).failed == ()
    assert [one for one, _ in step(plan, 4.5).failed] == [queued]
    ((one, error),) = step(plan, 5.0).failed
    assert (one, type(error)) == (late, DeadlineExceeded)
    assert not plan.running


def test_a_chunk_is_at_least_a_page() -> None:
    with pytest.raises(ValueError, match="less than a page"):
        Scheduler(PageTable(1), Limits(16, 15, 1))


prompts = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(prompts, st.integers(4, 40), st.sampled_from([4, 8, 20]), st.integers(1, 4), st.data())
def test_every_sequence_ends_and_gives_all_its_pages_back(
    wanted: list[tuple[int, int, int]], pages: int, chunk: int, running: int, data: st.DataObject
) -> None:
    """Whatever comes in, whoever is cancelled: the budget holds, pages are owned once, nothing starves or leaks."""
    plan = scheduler(pages, chunk, running)
    todo = [
        sequence(plan.pages, [kind * 7 + at // 9 for at in range(length)], answer, cache=True)
        for length, kind, answer in wanted
    ]
    live = list(todo)
    for one in todo:
        plan.add(one)
    for _ in range(2000):
        if not live:
            break
        if data.draw(st.integers(0, 19)) == 0:
            victim = data.draw(st.sampled_from(live))
            plan.remove(victim)
            victim.hold.release()
            live.remove(victim)
        turn = plan.turn(0.0)
        for one, _error in turn.failed:
            one.hold.release()
            live.remove(one)
        chunks = [chunk for group in turn.groups for chunk in group]
        assert sum(c.tokens for c in chunks if c.sequence.remaining > 1) <= chunk
        for one in chunks:
            end = one.sequence.computed + one.tokens
            assert end % PAGE == 0 or one.last
            assert end <= len(one.sequence.hold.pages) * PAGE
            last = one.last
            plan.computed(one)
            if last and one.sequence.append(7):
                plan.remove(one.sequence)
                one.sequence.hold.release()
                live.remove(one.sequence)
        plan.pages.check([one.hold for one in live])
    assert not live
    assert plan.pages.used == 0


def keyed(plan: Scheduler, prompt: list[int], **fields: object) -> Sequence:
    """One whose answer's pages are published too."""
    return sequence(plan.pages, prompt, cache=True, scope=SCOPE, **fields)  # type: ignore[arg-type]


def test_an_answer_s_pages_are_found_by_the_next_turn_of_its_conversation() -> None:
    plan = scheduler()
    one = keyed(plan, [1, 2])
    plan.add(one)
    for _ in range(9):
        step(plan)
    plan.remove(one)
    one.hold.release()
    assert one.tokens == [1, 2] + [7] * 9
    following = sequence(plan.pages, [*one.tokens, 5, 6], cache=True)
    plan.add(following)
    step(plan)
    assert following.published == 3
    assert sizes(step(plan)) == [1]


def test_pages_that_come_along_are_published_with_the_answers() -> None:
    plan = scheduler()
    pages = plan.pages.hold()
    pages.allocate(3)
    handed = keyed(plan, [1] * 9, sampled=(5,), computed=9)
    handed.hold = pages
    plan.add(handed)
    step(plan)
    assert plan.pages.matching(page_keys([1] * 9, SCOPE)) == 2
    for _ in range(3):
        step(plan)
    assert plan.pages.matching(page_keys([1] * 9 + [5, 7, 7], SCOPE)) == 3


def test_one_that_is_to_stay_private_publishes_nothing_more() -> None:
    plan = scheduler()
    one = keyed(plan, [1] * 6)
    plan.add(one)
    step(plan)
    plan.publishing.stop(one)
    for _ in range(8):
        step(plan)
    assert plan.pages.matching(page_keys(one.tokens, SCOPE)) == 1


def test_one_that_brings_its_pages_does_not_wait_for_those_that_want_some() -> None:
    """They may hold the very pages that the others wait for."""
    plan = scheduler(pages=4)
    pages = plan.pages.hold()
    pages.allocate(3)
    handed = sequence(plan.pages, [1] * 9, sampled=(5,), computed=9)
    handed.hold = pages
    large = sequence(plan.pages, [2] * 10)
    plan.add(large)
    plan.add(handed)
    assert step(plan).started == (handed,)


def test_a_prompt_is_admitted_only_where_the_answers_can_still_grow() -> None:
    plan = scheduler(pages=4)
    old = sequence(plan.pages, [1] * 8)
    plan.add(old)
    step(plan)
    new = sequence(plan.pages, [2] * 8)
    plan.add(new)
    assert [step(plan).started for _ in range(4)] == [(), (), (), ()]
    plan.remove(old)
    old.hold.release()
    assert step(plan).started == (new,)


def test_who_gives_way_is_never_one_whose_pages_are_being_filled() -> None:
    plan = scheduler(pages=6)
    old, filling = sequence(plan.pages, [1] * 8), sequence(plan.pages, [2] * 8, ready=False)
    plan.add(old)
    plan.add(filling)
    failed = [one for _ in range(12) for one, _ in step(plan).failed]
    assert failed == [old]
    assert len(filling.hold.pages) == 2
