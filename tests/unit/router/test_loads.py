"""What a worker has to do is what its card said, and what it was given since."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdbus.router.loads import Loads, Work
from tests.support.cards import card


def test_a_burst_between_two_cards_counts():
    """LESSONS, first table, 17: credit dispatches that no card has reported yet."""
    loads, first = Loads(), card("decode", "d", running=3, backlog=100)
    assert loads.of(first) == Work(3, 100)
    loads.book("d", 1, 40)
    loads.book("d", 1, 50)
    assert loads.of(first) == Work(5, 190)
    assert loads.of(card("decode", "d", running=5, backlog=150, seq=2)) == Work(5, 150)
    loads.release("d", 1, 40)
    loads.release("d", 1, 50)
    assert loads.idle


def test_a_prompt_that_is_read_shrinks_with_the_cards():
    loads = Loads()
    loads.of(card("prefill", "p"))
    loads.book("p", 1, 1000)
    assert loads.of(card("prefill", "p", running=1, backlog=300, seq=2)).tokens == 300
    loads.release("p", 0, 1000)
    assert loads.of(card("prefill", "p", running=1, backlog=300, seq=2)).tokens == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 900)), max_size=20))
def test_what_is_released_is_gone(booked: list[tuple[str, int, int]]):
    loads = Loads()
    for worker, requests, tokens in booked:
        loads.book(worker, requests, tokens)
    for worker, requests, tokens in booked:
        found = loads.of(card("decode", worker))
        assert found.requests >= requests
        loads.release(worker, requests, tokens)
    assert loads.idle


def test_workers_that_are_gone_are_forgotten_but_not_what_is_booked():
    loads = Loads()
    loads.of(card("decode", "d", running=4))
    loads.book("d", 1, 5)
    loads.forget_all_but([])
    assert loads.of(card("decode", "d", running=4, seq=2)).requests == 4
    loads.release("d", 1, 5)
    assert loads.idle
