"""Single flight: who waits for whom, and when a flight ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from pdbus.caching.fences import Fence
from pdbus.errors import Unavailable
from pdbus.router.flights import Flight, Flights

PLACE = (b"key", None)


class Work:
    """Begun once `go` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go, self.cancelled, self.error = asyncio.Event(), False, error

    async def __call__(self) -> Mapping[bytes, int]:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error:
            raise self.error
        return {b"key": 1}


async def waiting(flights: Flights[int], flight: Flight[int]) -> asyncio.Task[None]:
    task = asyncio.create_task(flights.wait([flight]))
    await asyncio.sleep(0)
    return task


async def test_a_flight_is_joined_until_it_ends():
    async with Flights[int]() as flights:
        work = Work()
        flight = flights.begin([PLACE], work)
        assert flights.joinable(PLACE) is flight
        both = [await waiting(flights, flight), await waiting(flights, flight)]
        work.go.set()
        await asyncio.gather(*both)
        assert flight.task.result() == {b"key": 1}
        assert flights.joinable(PLACE) is None
        assert len(flights) == 0


async def test_it_goes_on_while_one_waits_and_ends_with_the_last():
    async with Flights[int]() as flights:
        work = Work()
        flight = flights.begin([PLACE], work)
        one, other = await waiting(flights, flight), await waiting(flights, flight)
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        assert not work.cancelled
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        assert work.cancelled
        assert len(flights) == 0


async def test_an_item_that_was_deleted_since_is_not_joined():
    async with Flights[int]() as flights:
        work = Work()
        flight = flights.begin([(b"key", Fence("node", 1))], work)
        assert flights.joinable((b"key", Fence("node", 1))) is flight
        assert flights.joinable((b"key", Fence("node", 2))) is None
        assert flights.joinable((b"key", Fence("another life", 1))) is None
        work.go.set()
        await flights.wait([flight])


async def test_a_newer_flight_for_the_same_outlives_the_end_of_the_older():
    async with Flights[int]() as flights:
        older, newer = Work(), Work()
        first, second = flights.begin([PLACE], older), flights.begin([PLACE], newer)
        older.go.set()
        await flights.wait([first])
        assert flights.joinable(PLACE) is second
        newer.go.set()
        await flights.wait([second])


async def test_a_failure_is_each_waiter_s_to_look_at_and_nobody_s_to_miss(caplog: pytest.LogCaptureFixture):
    async with Flights[int]() as flights:
        work = Work(Unavailable("no"))
        flight = flights.begin([PLACE], work)
        work.go.set()
        await flights.wait([flight])
        with pytest.raises(Unavailable):
            flight.task.result()
    assert not caplog.records


async def test_leaving_ends_all():
    work = Work()
    async with Flights[int]() as flights:
        flight = flights.begin([PLACE], work)
        await asyncio.sleep(0)
    assert flight.task.cancelled()
    assert work.cancelled
