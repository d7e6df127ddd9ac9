"""Prompts are read here up to where a hand-over would be sooner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdbus.decode.threshold import Threshold
from pdbus.messages.presence import WHOLE_PROMPTS

PAGE, MOST, START = 16, 512, 32


def learned(local: tuple[float, float], remote: tuple[float, float], rounds: int = 3) -> Threshold:
    """Both ways' fixed time and that of a token in ms; prompts of all lengths that it has asked for were read here."""
    threshold = Threshold(PAGE, MOST)
    for _ in range(rounds):
        for tokens in (64, 200, 600, 1500):
            threshold.handed_over(tokens, (remote[0] + remote[1] * tokens) / 1e3)
        for tokens in (8, 24, threshold.tokens(0)):
            threshold.local(tokens, (local[0] + local[1] * tokens) / 1e3)
    return threshold


def test_before_anything_is_known_short_ones_are_read_here() -> None:
    threshold = Threshold(PAGE, MOST)
    assert threshold.tokens(0) == START
    threshold.local(20, 0.02)
    assert threshold.tokens(0) == START


def test_it_is_where_the_two_lines_cross() -> None:
    assert learned((5, 2.0), (105, 1.0), rounds=8).tokens(0) == 96


def test_what_is_as_fast_here_is_read_here_up_to_the_limit() -> None:
    assert learned((5, 1.0), (15, 1.0), rounds=8).tokens(0) == MOST
    assert Threshold(PAGE, 100).tokens(0) == START


def test_a_worker_that_is_far_slower_keeps_to_short_ones() -> None:
    assert learned((5, 10.0), (15, 0.1), rounds=8).tokens(0) == START


def test_it_goes_no_further_than_twice_what_was_tried() -> None:
    threshold = Threshold(PAGE, MOST)
    threshold.handed_over(300, 9.0)
    found = []
    for _ in range(6):
        found.append(threshold.tokens(0))
        threshold.local(found[-1], 0.001 * found[-1])
    assert found == [32, 64, 128, 256, 512, 512]


def test_where_all_prompts_are_longer_one_is_tried_now_and_then() -> None:
    threshold = Threshold(PAGE, MOST)
    tried = []
    for number in range(200):
        if threshold.tokens(0) >= 300:
            tried.append(number)
            threshold.local(300, 3.0)
        else:
            threshold.handed_over(300, 0.3)
    assert 3 <= len(tried) <= 8


def test_it_follows_a_change_of_load() -> None:
    threshold = learned((5, 1.0), (15, 1.0), rounds=8)
    for tokens in [16, 128, 400] * 5:
        threshold.local(tokens, 0.02 * tokens)
    assert threshold.tokens(0) == START
    for tokens in [8, 16, 32] * 5:
        threshold.local(tokens, 0.001 * tokens)
    assert threshold.tokens(0) > START


def test_what_waits_there_already_comes_first() -> None:
    threshold = learned((5, 1.0), (15, 1.0), rounds=8)
    assert (threshold.tokens(100), threshold.tokens(5000)) == (MOST - 100, 0)


def test_a_colocated_worker_takes_them_all() -> None:
    threshold = Threshold(PAGE, MOST, colocated=True)
    threshold.local(100, 9.0)
    threshold.handed_over(100, 0.01)
    assert threshold.tokens(10_000) == WHOLE_PROMPTS


samples = st.lists(st.tuples(st.integers(0, 8000), st.floats(0.0, 100.0)), max_size=20)


@given(local=samples, remote=samples, backlog=st.integers(0, 1000))
def test_whatever_was_measured_it_stays_within_its_limits(
    local: list[tuple[int, float]], remote: list[tuple[int, float]], backlog: int
) -> None:
    threshold = Threshold(PAGE, MOST)
    for one in local:
        threshold.local(*one)
    for one in remote:
        threshold.handed_over(*one)
    assert max(START - backlog, 0) <= threshold.tokens(backlog) <= max(MOST - backlog, 0)
