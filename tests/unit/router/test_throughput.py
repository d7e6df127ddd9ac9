"""Predictions follow what was measured, are kept by nearly all, and never lock anybody out for good."""

from __future__ import annotations

import math
import random

import pytest

from pdbus.router.throughput import Throughput


def worked(known: Throughput, choices: int, rate: float, begin_s: float, seconds: int = 20) -> float:
    """So many at work all the time, each of a cost of 5, make `rate` together."""
    known.at_work(choices, begin_s)
    each_s = 5 * choices / rate
    for number in range(choices * int(seconds / each_s + 1)):
        at_s = begin_s + (number // choices) * each_s
        begun = known.begin(5, at_s)
        if number % choices == choices - 1:
            known.end(begun, at_s + each_s, whole=True)
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
    assert known.rate(8, now) == pytest.approx(math.sqrt(100 * 700), rel=0.1)  # a power: 2, 8, 32
    assert known.raw_s(70, 32, now) == pytest.approx(70 * 32 / 700, rel=0.1)


def test_where_nothing_was_measured_a_choice_goes_on_as_fast_as_among_the_next() -> None:
    known = Throughput()
    now = worked(known, 4, 100, 0.0)
    assert known.raw_s(50, 64, now) == pytest.approx(known.raw_s(50, 4, now))
    assert known.raw_s(50, 1, now) == pytest.approx(known.raw_s(50, 4, now))


def test_where_more_share_all_there_is_still_more_are_as_much_slower() -> None:
    known = Throughput()
    now = worked(known, 8, 400, 0.0)
    now = worked(known, 32, 400, now)
    assert known.rate(64, now) == pytest.approx(400, rel=0.1)
    assert known.raw_s(50, 64, now) == pytest.approx(50 * 64 / 400, rel=0.1)
    assert known.raw_s(50, 4, now) == pytest.approx(50 * 8 / 400, rel=0.1)


def test_idle_time_slows_no_rate_down() -> None:
    known = Throughput()
    now = worked(known, 1, 100, 0.0)
    now = worked(known, 1, 100, now + 30)
    assert known.rate(1, now) == pytest.approx(100, rel=0.1)


def test_what_has_not_ended_yet_says_nothing() -> None:
    known = Throughput()
    now = worked(known, 1, 100, 0.0)
    known.at_work(40, now)
    begun = [known.begin(1000, now) for _ in range(40)]
    assert known.raw_s(100, 41, now + 30) == pytest.approx(known.raw_s(100, 1, now))
    known.end(begun[0], now + 40, whole=True)
    assert known.raw_s(100, 41, now + 40) == pytest.approx(4.0, rel=0.1)


def test_what_was_measured_long_ago_counts_no_more() -> None:
    known = Throughput()
    known.at_work(1, 0.0)
    known.end(known.begin(10, 0.0), 500.0, whole=True)
    assert known.raw_s(10, 8, 500.0) == pytest.approx(500.0)
    assert known.raw_s(10, 8, 561.0) is None
    assert known.least_s(10, 561.0) == 0.0


def test_one_that_its_deadline_ended_was_slow() -> None:
    known = Throughput()
    known.at_work(1, 0.0)
    known.end(known.begin(10, 0.0), 10.0, whole=False)
    assert known.raw_s(10, 1, 10.0) == pytest.approx(12.5)
    assert known.least_s(10, 10.0) == 0.0


def test_nearly_all_end_within_what_is_counted_on() -> None:
    known, draw, late, now = Throughput(), random.Random(1), 0, 0.0
    known.at_work(1, now)
    for number in range(4000):
        begun, taken_s = known.begin(1, now), draw.lognormvariate(0.0, 0.5)
        raw_s = known.raw_s(1, 1, now)
        late += number >= 1000 and raw_s is not None and taken_s > known.seconds(raw_s, now)
        now += taken_s
        known.end(begun, now, whole=True)
    assert late / 3000 < 0.05
    assert known.seconds(1.0, now) <= 2.7
    assert known.seconds(1.0, now + 16) == 1.35


def test_that_more_came_in_the_meantime_makes_nobody_slow() -> None:
    """What is taken to take longer is what was slower than as many usually are."""
    known = Throughput()
    now = worked(known, 2, 200, 0.0)
    now = worked(known, 32, 200, now)
    known.at_work(2, now)
    begun = known.begin(100, now)
    known.at_work(32, now)
    known.end(begun, now + 16, whole=True)
    assert known.seconds(1.0, now + 16) == pytest.approx(1.35, rel=0.05)


def test_the_least_time_is_that_of_the_quickest() -> None:
    known = Throughput()
    known.at_work(1, 0.0)
    known.end(known.begin(10, 0.0), 2.0, whole=True)
    known.end(known.begin(10, 2.0), 6.0, whole=True)
    assert known.least_s(100, 6.0) == pytest.approx(10.0)
