"""The fence: at most one run of an attempt, none of an older one, none after a cancel."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.context import LONGEST_DEADLINE_S
from pdbus.engine import attempts
from pdbus.engine.attempts import Attempts
from pdbus.errors import Cancelled, Overloaded, StaleAttempt, Unavailable
from pdbus.messages.workers import Cancel


def admit(table: Attempts, attempt: int, choice: int = 0, now_s: float = 0.0) -> bool:
    return table.admit("r", choice, f"r-{choice}", attempt, now_s)


def test_an_attempt_is_new_once() -> None:
    table = Attempts()
    assert admit(table, 1)
    assert not admit(table, 1)
    assert admit(table, 3)
    with pytest.raises(StaleAttempt):
        admit(table, 2)
    assert admit(table, 1, choice=1)


@pytest.mark.parametrize("choice", [0, None])
def test_a_cancel_refuses_attempts_up_to_its_own(choice: int | None) -> None:
    table = Attempts()
    table.cancel(Cancel("r", 2, "router", (), choice), 0.0)
    table.cancel(Cancel("r", 1, "router", (), choice), 0.0)
    for attempt in (1, 2):
        with pytest.raises(Cancelled):
            admit(table, attempt)
    assert admit(table, 3)
    if choice is None:
        with pytest.raises(Cancelled):
            admit(table, 1, choice=1)
    else:
        assert admit(table, 1, choice=1)


def test_a_failed_attempt_is_refused_with_its_failure() -> None:
    table = Attempts()
    admit(table, 1)
    table.fail("r-0", 1, Unavailable("gone"))
    with pytest.raises(Unavailable):
        admit(table, 1)
    assert admit(table, 2)
    table.fail("r-0", 1, Overloaded("late"))
    assert not admit(table, 2)


def test_an_attempt_that_was_refused_for_want_of_room_may_come_again() -> None:
    table = Attempts()
    admit(table, 1)
    table.forget("r-0", 1)
    assert admit(table, 1)


def test_what_every_deadline_has_passed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    table, later = Attempts(), LONGEST_DEADLINE_S + 1.0
    admit(table, 1)
    table.cancel(Cancel("r", 1, "router", ()), 0.0)
    table.admit("other", 0, "other-0", 1, later)
    table.cancel(Cancel("other", 1, "router", ()), later)
    assert admit(table, 1, now_s=later)
    monkeypatch.setattr(attempts, "CAPACITY", 2)
    for number in range(3):
        table.admit(f"x{number}", 0, f"x{number}-0", 1, later)
    assert len(table._newest) == 2


@given(st.lists(st.tuples(st.sampled_from(["admit", "cancel"]), st.integers(1, 4)), max_size=30))
def test_no_attempt_is_admitted_twice_nor_after_a_newer_one_or_its_cancel(steps: list[tuple[str, int]]) -> None:
    table = Attempts()
    newest = cancelled = 0
    for kind, attempt in steps:
        if kind == "cancel":
            table.cancel(Cancel("r", attempt, "router", ()), 0.0)
            cancelled = max(cancelled, attempt)
            continue
        try:
            new = admit(table, attempt)
        except (StaleAttempt, Cancelled):
            assert attempt < newest or attempt <= cancelled
        else:
            assert attempt > cancelled
            assert new == (attempt > newest)
            newest = max(newest, attempt)


def test_what_is_known_of_a_failure_keeps_nothing_of_what_failed() -> None:
    class Pages:
        pass

    def failing() -> weakref.ref[Pages]:
        pages = Pages()
        try:
            raise Unavailable("its worker died")
        except Unavailable as error:
            attempts.fail("r-0", 1, error)
        return weakref.ref(pages)

    attempts = Attempts()
    attempts.admit("r", 0, "r-0", 1, 0.0)
    held = failing()
    gc.collect()
    assert held() is None
    with pytest.raises(Unavailable, match="its worker died"):
        attempts.admit("r", 0, "r-0", 1, 1.0)
