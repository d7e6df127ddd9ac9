"""Looking up is never slower than computing by more than its bound, and what is measured decides."""

from __future__ import annotations

import pytest

from pdbus.engine.rates import Rates

PAGE_BYTES, PAGE_TOKENS = 1000, 16


def rates(*, compute_s: float | None = None, read_s: float | None = None, miss_s: float | None = None) -> Rates:
    """Of a worker that measured these: seconds a page, and of a look-up in vain."""
    made = Rates(PAGE_BYTES, PAGE_TOKENS)
    for _ in range(5):
        if compute_s is not None:
            made.computed(160, 10 * compute_s)
        if read_s is not None:
            made.read(4, 4 * read_s)
        if miss_s is not None:
            made.missed(miss_s)
    return made


@pytest.mark.parametrize("known", [{}, {"read_s": 9.0}, {"miss_s": 9.0}, {"compute_s": 1.0}])
def test_what_is_not_known_is_learned_by_doing(known: dict[str, float]) -> None:
    assert rates(**known).worth_asking(1)
    assert not rates(**known).worth_asking(0)


@pytest.mark.parametrize(("read_s", "worth"), [(0.5, True), (0.8, True), (0.81, False), (3.0, False)])
def test_reading_has_to_be_faster_than_computing(read_s: float, worth: bool) -> None:
    assert rates(compute_s=1.0, read_s=read_s).worth_asking(100) == worth


@pytest.mark.parametrize(("pages", "worth"), [(1, False), (33, False), (34, True), (1000, True)])
def test_a_look_up_in_vain_costs_a_cold_prompt_at_most_three_percent(pages: int, worth: bool) -> None:
    assert rates(compute_s=0.01, read_s=0.001, miss_s=0.01).worth_asking(pages) == worth


def test_one_slow_moment_decides_nothing() -> None:
    made = rates(compute_s=1.0, read_s=0.1, miss_s=0.01)
    made.read(1, 60.0)
    made.missed(60.0)
    assert made.worth_asking(10)


def test_a_rate_that_spoke_against_it_is_learned_anew() -> None:
    made = rates(compute_s=1.0, read_s=2.0)
    asked = [made.worth_asking(10) for _ in range(64)]
    assert 1 <= sum(asked) <= 3
    for _ in range(8):
        made.read(10, 1.0)
    made.read(10, 1.0)
    made.read(10, 1.0)
    assert made.worth_asking(10)


def test_a_read_is_waited_for_as_long_as_it_pays() -> None:
    assert rates().patience_s(10, 2.0) == 2.0
    assert rates(compute_s=0.01).patience_s(10, 2.0) == pytest.approx(0.08)
    assert rates(compute_s=1.0).patience_s(10, 2.0) == pytest.approx(8.0)
    assert rates(compute_s=1e-6).patience_s(10, 2.0) == 0.05, (
        "a fast worker must not take a sound node for a broken one"
    )


def test_a_few_tokens_tell_nothing_of_the_rate() -> None:
    made = Rates(PAGE_BYTES, PAGE_TOKENS)
    made.computed(1, 1.0)
    assert made.page_compute_s is None
