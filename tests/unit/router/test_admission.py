"""Bounded admission: so many choices run, so many requests wait, all others are told when to come again."""

from __future__ import annotations

import asyncio

import pytest

from pdbus.context import Deadline
from pdbus.errors import DeadlineExceeded, Overloaded, Unavailable
from pdbus.router.admission import Admission


async def _hold(admission: Admission, weight: int, release: asyncio.Event, seconds: float = 5) -> None:
    async with admission.slot(weight, Deadline.after(seconds)):
        await release.wait()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_beyond_the_queue_are_refused_with_a_time():
    admission, release = Admission(2, 1), asyncio.Event()
    tasks = [asyncio.create_task(_hold(admission, 1, release)) for _ in range(3)]
    await _settle()
    assert (admission.running, admission.waiting) == (2, 1)
    with pytest.raises(Overloaded) as caught:
        async with admission.slot(1, Deadline.after(5)):
            pass
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1
    release.set()
    await asyncio.gather(*tasks)
    assert (admission.running, admission.waiting) == (0, 0)


async def test_slots_go_in_the_order_of_asking():
    admission, order = Admission(1, 10), []

    async def take(number: int) -> None:
        async with admission.slot(1, Deadline.after(5)):
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(take(number) for number in range(6)))
    assert order == list(range(6))


async def test_a_large_request_is_not_starved_by_small_ones():
    admission, first, rest = Admission(4, 10), asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(_hold(admission, 2, first))
    await _settle()
    large = asyncio.create_task(_hold(admission, 4, rest))
    await _settle()
    small = asyncio.create_task(_hold(admission, 1, rest))
    await _settle()
    assert admission.waiting == 2
    first.set()
    await _settle()
    assert (admission.running, admission.waiting) == (4, 1)
    rest.set()
    await asyncio.gather(running, large, small)


async def test_a_request_of_more_choices_than_there_are_runs_alone():
    admission = Admission(2, 1)
    async with admission.slot(9, Deadline.after(5)):
        assert admission.running == 2
    assert admission.running == 0


async def test_the_deadline_ends_the_wait_and_holds_nothing():
    admission, release = Admission(1, 5), asyncio.Event()
    holder = asyncio.create_task(_hold(admission, 1, release))
    await _settle()
    with pytest.raises(DeadlineExceeded):
        await _hold(admission, 1, release, seconds=0.01)
    assert admission.waiting == 0
    release.set()
    await holder


async def test_cancelling_a_waiter_at_any_moment_loses_no_slot():
    for turns in range(6):
        admission, release = Admission(1, 5), asyncio.Event()
        holder = asyncio.create_task(_hold(admission, 1, release))
        await _settle()
        waiter = asyncio.create_task(_hold(admission, 1, asyncio.Event()))
        behind = asyncio.create_task(_hold(admission, 1, release))
        await _settle()
        release.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(holder, waiter, behind, return_exceptions=True)
        assert behind.exception() is None
        assert (admission.running, admission.waiting) == (0, 0)


async def test_closing_refuses_those_that_wait_and_lets_the_others_go_on():
    admission, release = Admission(1, 5), asyncio.Event()
    holder = asyncio.create_task(_hold(admission, 1, release))
    await _settle()
    waiter = asyncio.create_task(_hold(admission, 1, release))
    await _settle()
    admission.close()
    with pytest.raises(Unavailable):
        await waiter
    with pytest.raises(Unavailable):
        await _hold(admission, 1, release)
    release.set()
    await holder
    await asyncio.wait_for(admission.wait_idle(), 1)
