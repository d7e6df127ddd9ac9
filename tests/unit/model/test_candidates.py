"""Candidates and draws are what a plain definition says, to the bit, on rows as long as a vocabulary."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.messages.common import Sampling
from pdbus.model.candidates import Floats, Ids, Logits, candidates, drawn, largest, shortlist
from pdbus.model.sampler import Sampler, best_of, token_logprob, uniform

SIZES = (100, 4096, 5003, 49152)


def plain(logits: Logits, sampling: Sampling) -> tuple[Ids, Floats]:
    """The definition, by sorting everything."""
    with np.errstate(over="ignore"):
        mass = np.exp((logits.astype(np.float64) - float(logits.max())) / sampling.temperature)
    ids = np.lexsort((np.arange(len(mass)), -mass))  # best first, of equals the lower id
    if sampling.top_k > 0:
        ids = np.sort(ids[: sampling.top_k])
    if sampling.top_p < 1:
        wanted = sampling.top_p * mass[np.sort(ids)].sum()
        ids = ids[np.lexsort((ids, -mass[ids]))]
        ids = ids[: int(mass[ids].cumsum().searchsorted(wanted)) + 1]
    ids = np.sort(ids)
    ids = ids[mass[ids] >= sampling.min_p] if sampling.min_p > 0 else ids
    return ids, mass[ids]


@st.composite
def rows(draw: st.DrawFn) -> Logits:
    """Smooth ones, ones with many equal values, almost flat ones, and ones with a few peaks far above the rest."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from(SIZES))
    row = rng.normal(0, 3, size)
    match draw(st.sampled_from(["smooth", "equals", "flat", "peaks"])):
        case "equals":
            row = row.round(draw(st.integers(0, 2)))
        case "flat":
            row = rng.integers(0, 2, size) * 1e-7
        case "peaks":
            row[rng.integers(0, size, 5)] += 30
            row[:3] = -np.inf
    return row.astype(np.float32)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([1e-6, 0.05, 0.3, 0.8, 1.0, 1.3, 5.0]),
    top_k=st.sampled_from([0, 0, 0, 1, 5, 40, 1000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.05, 1.0]),
)


@settings(max_examples=300, deadline=None)
@given(rows(), samplings)
def test_candidates_are_those_of_the_definition(row: Logits, sampling: Sampling) -> None:
    (ids, mass), (expected, expected_mass) = candidates(row, sampling), plain(row, sampling)
    assert np.array_equal(ids, expected)
    assert np.array_equal(mass, expected_mass)


@settings(max_examples=100, deadline=None)
@given(rows(), samplings, st.integers(0, 2**64 - 1))
def test_the_same_token_is_drawn_from_them(row: Logits, sampling: Sampling, seed: int) -> None:
    ids, mass = plain(row, sampling)
    held = mass.cumsum()
    expected = int(ids[held.searchsorted(uniform((seed, 0), 0) * held[-1], side="right")])
    assert Sampler(sampling, seed=seed, choice=0, prompt=()).choose(row).id == expected


@given(rows(), st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_first_that_exceeds_the_number(row: Logits, number: float) -> None:
    mass = np.exp(row.astype(np.float64))
    mass[:: len(mass) // 50] = 0.0
    held = mass.cumsum()
    index = drawn(mass, number)
    assert index == int(held.searchsorted(number * held[-1], side="right"))
    assert mass[index] > 0


@pytest.mark.parametrize(
    ("number", "expected"), [(0.0, 127), (0.2, 127), (0.25, 128), (0.5, 8191), (math.nextafter(1.0, 0.0), 8191)]
)
def test_a_draw_at_the_edge_of_a_block_is_right(number: float, expected: int) -> None:
    mass = np.zeros(8192)
    mass[[127, 128, 8191]] = 1.0, 1.0, 2.0  # the first block ends with 127
    assert drawn(mass, number) == expected


@given(rows(), st.integers(1, 700))
def test_a_shortlist_holds_the_best_and_all_their_equals(row: Logits, count: int) -> None:
    listed = shortlist(row, count)
    assert len(listed) >= min(count, len(row))
    assert (np.diff(listed) > 0).all()
    left_out = np.delete(row, listed)
    assert not len(left_out) or left_out.max() < row[listed].min()
    best = np.sort(np.lexsort((np.arange(len(row)), -row))[:count])
    assert np.array_equal(largest(row, count), best)


@given(rows(), st.integers(0, 20))
def test_log_probabilities_are_the_exact_ones(row: Logits, top: int) -> None:
    exact = row.astype(np.float64)
    expected = exact - (exact.max() + np.log(np.exp(exact - exact.max()).sum()))
    found = token_logprob(row, 7, top)
    assert found.logprob == expected[7]
    assert [value for _, value in found.top] == [expected[other] for other, _ in found.top]


def test_the_best_of_a_batch_are_those_of_its_rows() -> None:
    batch = np.random.default_rng(0).normal(0, 1, (5, 4096)).astype(np.float32).round(1)
    batch[2, 7] = np.nan
    best = best_of(batch)
    assert best[2] == 7
    greedy: Any = {"seed": 1, "choice": 0, "prompt": ()}
    for row, found in zip(np.delete(batch, 2, 0), np.delete(best, 2), strict=True):
        expected = int(np.flatnonzero(row == row.max())[0])
        assert Sampler(Sampling(temperature=0.0), **greedy).choose(row, int(found)).id == found == expected
