"""A request that workers die of ends; one that only met workers which were stopped, or lost sight of, goes on."""

from __future__ import annotations

import pytest

from pdbus.errors import PdbusError
from pdbus.router.deaths import MOST_DEATHS, Deadly, Deaths


def test_a_request_ends_with_the_last_death_that_it_may_cause() -> None:
    deaths = Deaths(lambda worker, incarnation: True)
    for life in range(MOST_DEATHS - 1):
        deaths.add("w", str(life), "gone")
    with pytest.raises(Deadly, match="gone") as raised:
        deaths.add("w", "last", "gone")
    assert isinstance(raised.value, PdbusError)
    assert not raised.value.retryable


def test_deaths_before_the_last_token_do_not_count() -> None:
    deaths = Deaths(lambda worker, incarnation: True)
    for life in range(3 * MOST_DEATHS):
        deaths.add("w", str(life), "gone")
        deaths.forget()


def test_whoever_came_back_was_not_dead() -> None:
    back = {"0", "2"}
    deaths = Deaths(lambda worker, incarnation: incarnation not in back)
    for life in range(MOST_DEATHS + 1):
        deaths.add("w", str(life), "silent")
    with pytest.raises(Deadly):
        deaths.add("w", "x", "silent")


def test_a_worker_that_all_lose_sight_of_for_a_moment_is_no_death_however_often() -> None:
    deaths = Deaths(lambda worker, incarnation: False)
    for _ in range(5 * MOST_DEATHS):
        deaths.add("w", "one", "silent")
