"""Retries: jittered, and within one budget."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pdbus.backoff import RetryBudget, backoff_s


@given(st.integers(1, 200), st.integers())
def test_waits_grow_to_a_second_and_never_beyond(retry: int, seed: int) -> None:
    assert 0.0 <= backoff_s(retry, random.Random(seed)) <= min(1.0, 0.05 * 2.0 ** (min(retry, 30) - 1))


moments = st.lists(st.tuples(st.floats(0.0, 3.0), st.booleans()), max_size=200)


@given(moments, st.floats(0.0, 1.0), st.floats(0.1, 10.0), st.integers(1, 30))
def test_no_more_retries_are_made_than_requests_and_time_have_paid_for(
    steps: list[tuple[float, bool]], share: float, per_s: float, most: int
) -> None:
    """However requests and failures mix: up to any moment, those whose turn has come are covered."""
    budget = RetryBudget(0.0, share=share, per_s=per_s, most=most)
    now_s, asked = 0.0, 0
    made: list[tuple[float, int]] = []
    for pause_s, fails in steps:
        now_s += pause_s
        if fails:
            made.append((now_s + budget.take(now_s), asked))
        else:
            asked += 1
            budget.asked()
    made.sort()
    for number, (at_s, _) in enumerate(made, start=1):
        assert number <= most + share * asked + per_s * at_s + 1e-6


def test_what_is_not_made_is_there_for_others() -> None:
    budget = RetryBudget(0.0, share=0.0, per_s=1.0, most=1.0)
    assert budget.take(0.0) == 0.0
    assert budget.take(0.0) == 1.0
    budget.put_back()
    assert budget.take(0.0) == 1.0
