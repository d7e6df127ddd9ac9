"""Randomness: reproducible from (seed, choice, output index) alone, and distributed as it should be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.messages.common import Sampling
from pdbus.model.candidates import Logits, candidates
from pdbus.model.sampler import Sampler, uniform

u64 = st.integers(0, 2**64 - 1)


def rows(seed: int, count: int, vocab: int = 50) -> list[Logits]:
    return list(np.random.default_rng(seed).normal(0, 2, (count, vocab)).astype(np.float32))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean."""
    freedom = len(expected) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_draws_are_philox_as_published() -> None:
    """Known answers of Random123 (kat_vectors, philox4x64 with 10 rounds)."""
    ones = 2**64 - 1
    assert uniform((0, 0), 0) == (0x16554D9ECA36314C >> 11) / 2**53
    assert uniform((ones, ones), 2**256 - 1) == (0x87B092C3013FE90B >> 11) / 2**53


@given(u64, u64, st.integers(0, 2**31))
def test_a_draw_lies_below_one(seed: int, choice: int, index: int) -> None:
    assert 0.0 <= uniform((seed, choice), index) < 1.0


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 127), st.integers(0, 30))
def test_another_worker_continues_with_the_same_tokens(seed: int, choice: int, cut: int) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, frequency_penalty=0.2, repetition_penalty=1.1)
    logits = rows(3, 30)
    first = Sampler(sampling, seed=seed, choice=choice, prompt=[4, 5])
    whole = [first.choose(row).id for row in logits]
    second = Sampler(sampling, seed=seed, choice=choice, prompt=[4, 5], delivered=whole[:cut])
    assert second.index == cut
    assert [second.choose(row).id for row in logits[cut:]] == whole[cut:]


def test_samplers_side_by_side_do_not_disturb_each_other() -> None:
    logits = rows(4, 20)
    alone = [
        [one.choose(row).id for row in logits]
        for one in (Sampler(Sampling(), seed=seed, choice=0, prompt=()) for seed in range(5))
    ]
    together = [Sampler(Sampling(), seed=seed, choice=0, prompt=()) for seed in range(5)]
    assert [
        list(ids) for ids in zip(*([one.choose(row).id for one in together] for row in logits), strict=True)
    ] == alone


def test_seed_and_choice_each_make_another_answer() -> None:
    logits = rows(5, 40)

    def answer(seed: int, choice: int) -> tuple[int, ...]:
        one = Sampler(Sampling(), seed=seed, choice=choice, prompt=())
        return tuple(one.choose(row).id for row in logits)

    assert len({answer(seed, choice) for seed in (0, 1, 2, 2**63) for choice in (0, 1, 2)}) == 12


@pytest.mark.parametrize("vary", ["index", "seed", "choice"])
def test_draws_are_uniform_along_each_of_their_coordinates(vary: str) -> None:
    draws = [
        uniform((at if vary == "seed" else 7, at if vary == "choice" else 0), at if vary == "index" else 3)
        for at in range(4000)
    ]
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert abs(chi_square(counts, np.full(20, 200.0))) < 5
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.08


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.6), Sampling(top_k=5), Sampling(top_p=0.8), Sampling(min_p=0.1)],
    ids=["plain", "temperature", "top-k", "top-p", "min-p"],
)
def test_tokens_come_as_often_as_their_probability_says(sampling: Sampling) -> None:
    (row,) = rows(6, 1, vocab=12)
    ids, mass = candidates(row, sampling)
    one = Sampler(sampling, seed=11, choice=0, prompt=())
    count = 6000
    drawn = np.bincount([one.choose(row).id for _ in range(count)], minlength=12)
    assert set(np.flatnonzero(drawn)) <= set(ids.tolist())
    assert abs(chi_square(drawn[ids], count * mass / mass.sum())) < 5
