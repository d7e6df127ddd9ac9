"""Nobody starves, shares are even, and a flood moves nobody's place by more than one entry."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.router.fair_queue import PATIENCE, Entry, FairQueue

costs = st.floats(1, 100)
Queue = FairQueue[int]


def push(queue: Queue, tenant: str, cost: float = 1.0, priority: int = 5) -> Entry[int]:
    entry = Entry(tenant, priority, cost, 0)
    queue.push(entry)
    return entry


def serve(queue: Queue) -> Entry[int]:
    entry = next(queue.in_order())
    queue.serve(entry)
    return entry


def test_one_tenant_s_are_served_in_the_order_of_asking() -> None:
    queue: Queue = FairQueue()
    entries = [push(queue, "a", cost) for cost in (5, 1, 3)]
    assert [serve(queue) for _ in entries] == entries
    assert len(queue) == 0


def test_higher_priorities_go_first_but_not_for_ever() -> None:
    queue: Queue = FairQueue()
    low = push(queue, "a", priority=1)
    for _ in range(3 * PATIENCE):
        push(queue, "b", priority=9)
    served = [serve(queue) for _ in range(PATIENCE + 1)]
    assert {entry.priority for entry in served[:-1]} == {9}
    assert served[-1] is low


@given(st.lists(st.tuples(st.sampled_from("abc"), costs, st.integers(0, 9), st.booleans()), max_size=60))
def test_all_that_wait_are_served_or_leave(asked: list[tuple[str, float, int, bool]]) -> None:
    queue: Queue = FairQueue()
    entries = [(push(queue, tenant, cost, priority), leaves) for tenant, cost, priority, leaves in asked]
    for entry, leaves in entries:
        assert not leaves or queue.remove(entry)
        assert not leaves or not queue.remove(entry)
    staying = {entry for entry, leaves in entries if not leaves}
    assert set(queue) == staying
    assert {serve(queue) for _ in range(len(queue))} == staying
    assert (len(queue), list(queue.in_order())) == (0, [])


@settings(max_examples=60)
@given(st.lists(costs, min_size=40, max_size=40), st.lists(costs, min_size=40, max_size=40), st.integers(1, 39))
def test_two_that_wait_all_the_time_get_the_same(first: list[float], second: list[float], count: int) -> None:
    queue: Queue = FairQueue()
    for one, other in zip(first, second, strict=True):
        push(queue, "a", one)
        push(queue, "b", other)
    got = {"a": 0.0, "b": 0.0}
    for _ in range(count):
        entry = serve(queue)
        got[entry.tenant] += entry.cost
    assert abs(got["a"] - got["b"]) <= max(first) + max(second)


@given(st.lists(costs, min_size=1, max_size=50), st.integers(0, 10), costs)
def test_a_flood_moves_another_s_place_by_one_entry_at_most(flood: list[float], served: int, cost: float) -> None:
    queue: Queue = FairQueue()
    for one in flood:
        push(queue, "flood", one)
    for _ in range(min(served, len(flood) - 1)):
        serve(queue)
    quiet = push(queue, "quiet", cost)
    assert quiet in (serve(queue), serve(queue))


@given(st.lists(st.tuples(st.sampled_from("abc"), costs, st.integers(4, 6)), max_size=30), st.integers(0, 20))
def test_what_is_ahead_is_what_is_served_before(asked: list[tuple[str, float, int]], served: int) -> None:
    queue: Queue = FairQueue()
    for tenant, cost, priority in asked:
        push(queue, tenant, cost, priority)
    for _ in range(min(served, len(asked))):
        serve(queue)
    if len(asked) > PATIENCE:
        return  # then one of a lower priority may go before
    told = queue.ahead("a", 5)
    new, before = push(queue, "a", 7.0), 0.0
    while (entry := serve(queue)) is not new:
        before += entry.cost
    largest = max((cost for _, cost, _ in asked), default=0.0)
    assert before - 3 * largest <= told <= before + 3 * largest


def test_a_tenant_that_leaves_and_comes_back_has_not_lost_what_it_got() -> None:
    queue: Queue = FairQueue()
    push(queue, "a", 10)
    push(queue, "b", 1)
    assert serve(queue).tenant == "a"
    again = push(queue, "a", 10)
    push(queue, "b", 1)
    assert [serve(queue).tenant for _ in range(3)] == ["b", "b", "a"]
    assert not queue.remove(again)


def test_who_goes_where_not_all_can_wait() -> None:
    queue: Queue = FairQueue()
    push(queue, "a", priority=9)
    entries = [push(queue, tenant) for tenant in "abbb"]
    assert queue.last() is entries[-1]
    low = push(queue, "c", priority=0)
    assert queue.last() is low


def test_those_of_equal_tags_come_in_the_order_of_asking() -> None:
    queue: Queue = FairQueue()
    entries = [push(queue, tenant) for tenant in "cab"]
    assert [entry.tenant for entry in queue.in_order()] == ["c", "a", "b"]
    assert all(one is not other for one, other in pairwise(entries))
