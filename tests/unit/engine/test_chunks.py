"""Answers and prompts in one worker: neither starves, nor does a short prompt behind long ones."""

from __future__ import annotations

from dataclasses import replace

from pdbus.engine.scheduler import Limits, Scheduler
from pdbus.engine.sequence import Sequence
from pdbus.engine.tenants import Tenants
from pdbus.kv.pages import PageTable
from tests.support.sequences import sequence

PAGE = 4


def scheduler(pages: int = 400, chunk: int = 64, running: int = 40) -> Scheduler:
    return Scheduler(PageTable(pages), Limits(PAGE, chunk, running))


def step(plan: Scheduler, token_s: float) -> dict[Sequence, int]:
    """A turn in which an answer's step takes 10 ms, and each prompt token so long. What was computed of whom."""
    turn = plan.turn(0.0)
    chunks = [chunk for group in turn.groups for chunk in group]
    done = {chunk.sequence: chunk.tokens for chunk in chunks}
    for chunk in chunks:
        last = chunk.last
        plan.computed(chunk)
        if last:
            chunk.sequence.append(7)
    plan.took(turn, 0.01 + token_s * sum(tokens for tokens in done.values() if tokens > 1))
    return done


def answering(plan: Scheduler, count: int) -> list[Sequence]:
    ones = [sequence(plan.pages, [number] * 3, 200) for number in range(count)]
    for one in ones:
        plan.add(one)
    step(plan, 0.001)
    return ones


def test_each_step_has_a_token_of_every_answer_and_some_of_the_prompt() -> None:
    plan = scheduler()
    answers = answering(plan, 3)
    prompt = sequence(plan.pages, [5] * 200)
    plan.add(prompt)
    read = []
    while prompt.remaining > 1:
        done = step(plan, 0.005)
        assert all(done[one] == 1 for one in answers)
        read.append(done[prompt])
    assert min(read[:-1]) >= PAGE
    assert max(read[1:]) <= 12  # of 64, so that a step takes about 50 ms


def test_without_answers_a_prompt_is_read_in_whole_chunks() -> None:
    plan = scheduler()
    plan.add(sequence(plan.pages, [5] * 200))
    assert [list(step(plan, 0.005).values()) for _ in range(3)] == [[64]] * 3


def test_a_short_prompt_does_not_wait_for_the_long_ones_before_it() -> None:
    """Also where a step has room for a single page."""
    plan = scheduler()
    answering(plan, 1)
    longs = [sequence(plan.pages, [10 + number] * 160) for number in range(4)]
    for one in longs:
        plan.add(one)
    for _ in range(6):
        step(plan, 0.05)
    short = sequence(plan.pages, [50] * 6)
    plan.add(short)
    turns = 0
    while short.remaining > 1:
        step(plan, 0.05)
        turns += 1
    assert turns <= 2 * (len(longs) + 1) + 1  # two chunks, each after one of everybody else
    assert max(one.computed for one in longs) - min(one.computed for one in longs) <= 2 * PAGE


def test_a_long_prompt_gets_on_however_many_short_ones_come() -> None:
    plan = scheduler()
    answering(plan, 1)
    long = sequence(plan.pages, [9] * 40)
    plan.add(long)
    for number in range(60):
        one = sequence(plan.pages, [100 + number] * 5, 1)
        plan.add(one)
        done = step(plan, 0.05)
        for ended in [one for one in done if one is not long and one.ticket.max_tokens == 1 and one.output_index]:
            plan.remove(ended)
            ended.hold.release()
        if long.remaining <= 1:
            break
    assert long.remaining <= 1


def test_an_interrupted_answer_is_read_again_before_new_prompts_and_with_more_of_each_step() -> None:
    """What a page-a-step pace would take dozens of steps for; the answers beside it go on meanwhile."""
    plan = scheduler(chunk=512)
    answers = answering(plan, 3)
    step(plan, 0.01)
    new = sequence(plan.pages, [5] * 150)
    plan.add(new)
    step(plan, 0.01)
    cut = [interrupted(plan, length) for length in (90, 60)]
    turns = []
    while any(one.remaining > 1 for one in cut):
        done = step(plan, 0.01)
        assert all(done[one] == 1 for one in answers)
        turns.append([done.get(one, 0) for one in cut])
    assert turns[0][1] > turns[0][0], "one after another: the shorter one goes on sooner"
    assert len(turns) <= 8
    assert new.remaining > 1


def test_interrupted_answers_are_admitted_first_and_beyond_the_slots_of_others() -> None:
    plan = scheduler(running=2)
    answering(plan, 2)
    waiting = sequence(plan.pages, [5] * 8)
    plan.add(waiting)
    cut = [interrupted(plan, 8) for _ in range(3)]
    step(plan, 0.001)
    assert [one in plan.running for one in (waiting, *cut)] == [False, True, True, False]


def test_interrupted_answers_go_before_others_of_their_priority_only() -> None:
    plan = scheduler()
    cut, new, urgent = interrupted(plan, 8), sequence(plan.pages, [5] * 8), sequence(plan.pages, [7] * 8)
    urgent.ticket = replace(urgent.ticket, priority=9)
    tenants = Tenants(4)
    tenants.look([cut, new, urgent], turn=1, now_s=0.0)
    assert tenants.first([new, cut, urgent]) == [urgent, cut, new]


def interrupted(plan: Scheduler, length: int) -> Sequence:
    """One whose answer was begun elsewhere, so many tokens in all."""
    one = sequence(plan.pages, [6] * length, 200)
    one.ticket = replace(one.ticket, prompt=one.ticket.prompt[:-3], delivered=one.ticket.prompt[-3:])
    plan.add(one)
    return one
