"""Answers and prompts in one worker: neither starves, nor does a short prompt behind long ones."""

from __future__ import annotations

from pdbus.engine.scheduler import Limits, Scheduler
from pdbus.engine.sequence import Sequence
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
