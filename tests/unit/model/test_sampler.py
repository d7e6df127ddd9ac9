"""What each sampling field does, exactly; test_sampler_draws.py has the randomness."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.errors import Corrupt
from pdbus.messages.common import Sampling
from pdbus.model.candidates import Logits, candidates
from pdbus.model.sampler import Sampler, token_logprob

GREEDY = Sampling(temperature=0.0)
hundredths = st.lists(st.integers(-3000, 3000), min_size=1, max_size=40)
logits_of = hundredths.map(lambda row: (np.array(row) / 100).astype(np.float32))
temperatures = st.floats(0.05, 5.0)


def sampler(sampling: Sampling, **history: Any) -> Sampler:
    return Sampler(sampling, **({"seed": 1, "choice": 0, "prompt": ()} | history))


def chosen(logits: list[float], sampling: Sampling, **history: Any) -> int:
    return sampler(sampling, **history).choose(np.array(logits, np.float32)).id


def kept(logits: Logits, **fields: Any) -> dict[int, float]:
    """Normalised probabilities of what can be drawn."""
    ids, mass = candidates(logits, Sampling(**fields))
    return dict(zip(ids.tolist(), (mass / mass.sum()).tolist(), strict=True))


def softmax(logits: Logits, temperature: float = 1.0) -> np.ndarray:
    exact = logits.astype(np.float64) / temperature
    mass = np.exp(exact - exact.max())
    return mass / mass.sum()


@given(logits_of)
def test_greedy_takes_the_best_and_the_lowest_id_of_equals(logits: Logits) -> None:
    assert sampler(GREEDY).choose(logits).id == int(np.flatnonzero(logits == logits.max())[0])


@given(logits_of, temperatures)
def test_without_filters_everything_can_come_as_softmax_says(logits: Logits, temperature: float) -> None:
    assert list(kept(logits, temperature=temperature).values()) == pytest.approx(
        softmax(logits, temperature), abs=1e-12
    )


@given(logits_of, st.integers(1, 45))
def test_top_k_keeps_the_k_best(logits: Logits, k: int) -> None:
    best = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:k]
    assert set(kept(logits, top_k=k)) == set(best)


@given(logits_of, st.floats(0.01, 0.999), temperatures)
def test_top_p_keeps_the_fewest_that_hold_p(logits: Logits, p: float, temperature: float) -> None:
    mass = softmax(logits, temperature)
    left = kept(logits, top_p=p, temperature=temperature)
    held = sorted((mass[token] for token in left), reverse=True)
    assert sum(held) >= p - 1e-9
    assert sum(held[:-1]) < p + 1e-9
    assert all(mass[other] <= held[-1] for other in set(range(len(mass))) - set(left))


def test_top_p_counts_what_top_k_left() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert set(kept(logits, top_p=0.7)) == {0, 1}
    assert set(kept(logits, top_k=2, top_p=0.55)) == {0}  # 0.4 of 0.7 is 0.571


@given(logits_of, st.floats(0.001, 1.0))
def test_min_p_keeps_what_is_near_the_best(logits: Logits, min_p: float) -> None:
    mass = softmax(logits)
    for token in range(len(mass)):
        if abs(mass[token] / mass.max() - min_p) > 1e-9:
            assert (token in kept(logits, min_p=min_p)) == (mass[token] / mass.max() > min_p)


@given(logits_of, st.integers(0, 5), st.floats(0.01, 1.0), st.floats(0.0, 1.0), temperatures)
def test_the_best_is_always_left_and_only_what_is_left_is_chosen(
    logits: Logits, k: int, p: float, min_p: float, temperature: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=k, top_p=p, min_p=min_p)
    left = set(candidates(logits, sampling)[0].tolist())
    assert sampler(GREEDY).choose(logits).id in left
    assert sampler(sampling).choose(logits).id in left


def test_a_flat_row_at_a_cut_keeps_the_lower_ids() -> None:
    flat = np.zeros(10, np.float32)
    assert list(kept(flat, top_k=3)) == [0, 1, 2]
    assert list(kept(flat, top_p=0.35)) == [0, 1, 2, 3]
    assert list(kept(flat, top_p=0.0)) == [0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert chosen([0.0, 2.0, 1.999], Sampling(temperature=temperature)) == 1


@pytest.mark.parametrize(
    ("penalty", "expected"), [(1.0, [0, 1, 2]), (2.0, [2, 0, 1])], ids=["off", "prompt and output alike"]
)
def test_repetition_penalty(penalty: float, expected: list[int]) -> None:
    """Positive logits are divided, negative ones multiplied: seen tokens become less likely either way."""
    sampling = dataclasses.replace(GREEDY, repetition_penalty=penalty)
    logits = np.array([3.0, 2.5, 2.0, -1.0], np.float32)
    order = []
    for banned in range(3):
        row = logits.copy()
        row[order] = -100.0
        order.append(chosen(row.tolist(), sampling, prompt=[0], delivered=[1]))
        assert len(order) == banned + 1
    assert order == expected
    assert chosen([-1.0, -1.5], dataclasses.replace(GREEDY, repetition_penalty=2.0), prompt=[0, 0, 0]) == 1


def test_presence_and_frequency_count_the_output_only() -> None:
    presence = dataclasses.replace(GREEDY, presence_penalty=0.6)
    assert chosen([1.0, 0.5], presence, prompt=[0, 0]) == 0
    assert chosen([1.0, 0.5], presence, delivered=[0]) == 1
    assert chosen([1.0, 0.3], presence, delivered=[0, 0, 0]) == 0, "once is as often as thrice"
    frequency = dataclasses.replace(GREEDY, frequency_penalty=0.3)
    assert chosen([1.0, 0.5], frequency, prompt=[0, 0]) == 0
    assert chosen([1.0, 0.5], frequency, delivered=[0]) == 0
    assert chosen([1.0, 0.5], frequency, delivered=[0, 0]) == 1


def test_penalties_count_what_was_just_chosen() -> None:
    one = sampler(dataclasses.replace(GREEDY, frequency_penalty=0.3))
    row = np.array([1.0, 0.5], np.float32)
    assert [one.choose(row).id for _ in range(4)] == [0, 0, 1, 0]


def test_logit_bias_bans_and_forces() -> None:
    assert chosen([1.0, 0.5, 0.0], dataclasses.replace(GREEDY, logit_bias=((0, -100.0),))) == 1
    assert chosen([1.0, 0.5, 0.0], Sampling(logit_bias=((2, 100.0),), repetition_penalty=1.3), prompt=[2]) == 2


@given(logits_of, st.integers(0, 20), st.data())
def test_logprobs_are_the_log_softmax_of_the_raw_logits(logits: Logits, top: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    found, expected = token_logprob(logits, token, top), np.log(softmax(logits))
    assert found.logprob == pytest.approx(expected[token], abs=1e-9)
    assert [other for other, _ in found.top] == sorted(range(len(logits)), key=lambda t: (-logits[t], t))[:top]
    assert [value for _, value in found.top] == pytest.approx([expected[other] for other, _ in found.top], abs=1e-9)


def test_logprobs_are_not_those_of_what_was_sampled_from() -> None:
    """As OpenAI reports them: temperature, penalties, bias and filters don't show."""
    logits = np.array([2.0, 1.0, 0.0], np.float32)
    sampling = Sampling(temperature=0.3, top_k=1, logit_bias=((2, 100.0),), presence_penalty=1.0, logprobs=2)
    sampled = sampler(sampling, delivered=[0]).choose(logits)
    assert sampled.id == 2
    assert sampled.logprob == token_logprob(logits, 2, 2)


def test_logprobs_come_only_where_asked_for() -> None:
    row = np.array([2.0, 1.0], np.float32)
    assert sampler(GREEDY).choose(row).logprob is None
    alone = sampler(dataclasses.replace(GREEDY, logprobs=0)).choose(row).logprob
    assert alone is not None
    assert alone.top == ()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_never_become_text(bad: float, temperature: float) -> None:
    one = sampler(Sampling(temperature=temperature))
    with pytest.raises(Corrupt):
        one.choose(np.array([0.0, bad, 1.0], np.float32))
    assert one.index == 0


def test_logits_are_left_as_they_were() -> None:
    row = np.array([2.0, 1.0, 0.5], np.float32)
    sampler(Sampling(repetition_penalty=1.5, logit_bias=((1, 5.0),), top_k=1, logprobs=3), prompt=[0]).choose(row)
    assert row.tolist() == [2.0, 1.0, 0.5]
