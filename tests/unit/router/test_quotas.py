"""Quotas: a refusal's time is true, and what is refused costs nothing."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pdbus.errors import InvalidRequest, Overloaded
from pdbus.router.identity import OPEN, Identity, Quota
from pdbus.router.quotas import Quotas


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quotas(clock: Clock) -> Quotas:
    return Quotas(clock)


def key(name: str = "k", **limits: int) -> Identity:
    return Identity("acme", Quota(**limits), 5, name)


def refused(quotas: Quotas, who: Identity, choices: int = 1) -> float:
    with pytest.raises(Overloaded) as told, quotas.hold(who, choices):
        pass
    assert told.value.retry_after_s is not None
    return told.value.retry_after_s


def ask(quotas: Quotas, who: Identity, tokens: int = 0) -> None:
    with quotas.hold(who, 1) as spending:
        spending.tokens(tokens)


def test_requests_a_minute_and_the_time_until_the_next(quotas: Quotas, clock: Clock) -> None:
    who = key(requests_per_minute=30)
    for _ in range(30):
        ask(quotas, who)
    wait_s = refused(quotas, who)
    assert wait_s == pytest.approx(2.0)
    clock.now += wait_s - 0.01
    assert refused(quotas, who) == pytest.approx(0.01)
    clock.now += 0.011
    ask(quotas, who)
    refused(quotas, who)


def test_being_refused_does_not_push_the_next_one_out(quotas: Quotas, clock: Clock) -> None:
    who = key(requests_per_minute=1)
    ask(quotas, who)
    for _ in range(100):
        assert refused(quotas, who) == pytest.approx(60.0)
    clock.now += 60.0
    ask(quotas, who)


def test_tokens_that_were_used_are_paid_off_before_more_is_taken(quotas: Quotas, clock: Clock) -> None:
    who = key(tokens_per_minute=600)
    ask(quotas, who, 1200)  # nobody knew beforehand
    wait_s = refused(quotas, who)
    assert wait_s == pytest.approx(60.1)
    clock.now += wait_s
    ask(quotas, who)


def test_an_idle_hour_saves_up_one_minute(quotas: Quotas, clock: Clock) -> None:
    who = key(requests_per_minute=2)
    ask(quotas, who)
    clock.now += 3600
    ask(quotas, who)
    ask(quotas, who)
    refused(quotas, who)


def test_choices_at_once(quotas: Quotas) -> None:
    who = key(max_inflight=4)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(quotas.hold(who, 2))
        assert refused(quotas, who) > 0
        with quotas.hold(key("other", max_inflight=4), 4):
            pass
    with quotas.hold(who, 4):
        pass


def test_more_choices_than_ever_fit_are_no_matter_of_time(quotas: Quotas) -> None:
    with pytest.raises(InvalidRequest), quotas.hold(key(max_inflight=4), 5):
        pass


def test_a_request_that_fails_gives_its_place_back(quotas: Quotas) -> None:
    who = key(max_inflight=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), quotas.hold(who, 1):
            raise ZeroDivisionError


def test_who_has_no_limit_is_never_refused(quotas: Quotas) -> None:
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(quotas.hold(OPEN, 64)).tokens(10**9)


def test_limits_that_change_in_the_file_count_from_then_on(quotas: Quotas) -> None:
    ask(quotas, key(requests_per_minute=1))
    refused(quotas, key(requests_per_minute=1))
    ask(quotas, key(requests_per_minute=2))
    ask(quotas, key())
