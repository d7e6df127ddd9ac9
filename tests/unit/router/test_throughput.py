"""Predictions follow what was measured, are kept by nearly all, and never lock anybody out for good."""

from __future__ import annotations

import random

import pytest

from pdbus.router.throughput import Throughput


def worked(known: Throughput, choices: int, rate: float, begin_s: float, seconds: int = 20) -> float:
    known.at_work(choices, begin_s)
    for tenth in range(1, seconds * 10 + 1):
        known.did(rate / 10, begin_s + tenth / 10)
    known.at_work(0, begin_s + seconds)
    return begin_s + seconds


def test_nothing_is_known_at_first() -> None:
    known = Throughput()
    assert (known.rate(4, 0.0), known.raw_s(10, 4, 0.0), known.least_s(10, 0.0)) == (None, None, 0.0)


def test_rates_are_those_measured_with_so_many_at_work_and_lie_between_them() -> None:
    known = Throughput()
    now = worked(known, 2, 100, 0.0)
    now = worked(known, 32, 700, now)
    assert known.rate(2, now) == pytest.approx(100, rel=0.1)
    assert known.rate(32, now) == pytest.approx(700, rel=0.1)
    assert known.rate(17, now) == pytest.approx(400, rel=0.1)
    assert known.raw_s(70, 32, now) == pytest.approx(70 * 32 / 700, rel=0.1)


def test_where_nothing_was_measured_a_choice_goes_on_as_fast_as_among_the_next() -> None:
    known = Throughput()
    now = worked(known, 4, 100, 0.0)
    assert known.raw_s(50, 64, now) == pytest.approx(known.raw_s(50, 4, now))
    assert known.raw_s(50, 1, now) == pytest.approx(known.raw_s(50, 4, now))


def test_idle_time_slows_no_rate_down() -> None:
    known = Throughput()
    now = worked(known, 1, 100, 0.0)
    now = worked(known, 1, 100, now + 30)
    assert known.rate(1, now) == pytest.approx(100, rel=0.1)


def test_what_was_measured_long_ago_counts_no_more() -> None:
    known = Throughput()
    now = worked(known, 8, 1e-3, 0.0)
    known.took(10, 1.0, 500.0, now)
    assert known.raw_s(10, 8, now) > 1000
    assert known.raw_s(10, 8, now + 61) is None
    assert known.least_s(10, now + 61) == 0.0


def test_nearly_all_end_within_what_is_counted_on() -> None:
    known, draw, late = Throughput(), random.Random(1), 0
    for number in range(4000):
        taken_s = draw.lognormvariate(0.3, 0.5)
        late += number >= 1000 and taken_s > known.seconds(1.0)
        known.took(1, 1.0, taken_s, float(number))
    assert 0.01 < late / 3000 < 0.05
    assert known.seconds(1.0) < 8


def test_the_least_time_is_that_of_the_quickest() -> None:
    known = Throughput()
    known.took(10, None, 2.0, 0.0)
    known.took(10, None, 4.0, 1.0)
    assert known.least_s(100, 2.0) == pytest.approx(10.0)
