"""The trace of chats: what it shares, and what of it an ideal cache would have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.tiers.cold import Pair, cost
from loadtest.tiers.command import summary
from loadtest.tiers.phases import Sample
from loadtest.tiers.trace import Trace, cacheable, hit_rates

PAGE = 4


def draw(label: str, tokens: int) -> list[int]:
    return [sum(label.encode()) + i for i in range(tokens)]


def test_turns_go_on_from_the_ones_before() -> None:
    trace = Trace(systems=2, system_tokens=8, sessions=3, turns=3, question_tokens=4, answer_tokens=2)
    prompts = trace.prompts(draw, seed=1)
    assert len(prompts) == 9
    assert prompts == trace.prompts(draw, seed=1)
    assert sorted({len(prompt) for prompt in prompts}) == [12, 18, 24]
    assert len({tuple(prompt[:8]) for prompt in prompts}) <= 2
    longest = [prompt for prompt in prompts if len(prompt) == 24]
    assert all(any(prompt[:12] == first for first in prompts) for prompt in longest)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), max_size=8))
def test_cacheable_is_the_longest_whole_pages_of_an_earlier_prompt(prompts: list[list[int]]) -> None:
    for index, found in enumerate(cacheable(prompts, PAGE)):
        best = 0
        for earlier in prompts[:index]:
            shared = 0
            while shared < min(len(earlier), len(prompts[index])) and earlier[shared] == prompts[index][shared]:
                shared += 1
            best = max(best, min(shared // PAGE * PAGE, (len(prompts[index]) - 1) // PAGE * PAGE))
        assert found == best


def test_hit_rates_by_tier() -> None:
    rates = hit_rates(prompt_tokens=1000, ideal=500, l1=360, l2=70, l3=20)
    assert (rates.cacheable, rates.hit, rates.l1) == (0.5, 0.9, 0.8)
    assert (rates.l2, rates.l3) == (70 / 140, 20 / 140)
    assert hit_rates(1000, 500, 500, 0, 0).l2 is None
    assert hit_rates(1000, 0, 0, 0, 0).hit == 0


def test_what_cold_prompts_lose_is_told_by_the_pairs_and_not_by_drift() -> None:
    found = cost([Pair(1020, 1000), Pair(2020, 2000), Pair(5100, 5000)])
    assert found["difference"] == pytest.approx(0.02)
    assert (found["with_nodes_ms"], found["without_ms"], found["pairs"]) == (2020, 2000, 3)


def test_tiers_are_summed_up_against_cold() -> None:
    samples = [Sample("cold", 1000, 0), Sample("cold", 800, 0), Sample("cold", 900, 0), Sample("L1", 30, 1536)]
    found = summary(samples)
    assert found["cold"] == {"first_ms": 900, "below_cold": 1, "cached_tokens": 0}
    assert found["L1"] == {"first_ms": 30, "below_cold": 30, "cached_tokens": 1536}
