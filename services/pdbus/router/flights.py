"""Single flight: an item that is being had already is waited for, not asked for again.

A flight belongs to all who wait for it. It goes on while one of them does, with the deadline of the one that began it;
where it fails, the others begin their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Self, TypeVar

from pdbus.caching.fences import Fence
from pdbus.tasks import cancelled

R = TypeVar("R")

Place = tuple[bytes, Fence | None]
"""A key, and the fence that its miss told: a flight begun before an item was deleted is not joined after it."""


@dataclass(eq=False)
class Flight(Generic[R]):
    """Some items, being had at once; `task` gives their values by key."""

    places: tuple[Place, ...]
    task: asyncio.Task[Mapping[bytes, R]]
    waiting: int = field(default=0)


class Flights(Generic[R]):
    """Those of one process, in one event loop. Leaving ends them."""

    def __init__(self) -> None:
        self._by_place: dict[Place, Flight[R]] = {}
        self._all: set[Flight[R]] = set()

    def __len__(self) -> int:
        return len(self._all)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        flights = tuple(self._all)
        for flight in flights:
            flight.task.cancel()
        await asyncio.gather(*(flight.task for flight in flights), return_exceptions=True)

    def joinable(self, place: Place) -> Flight[R] | None:
        return self._by_place.get(place)

    def begin(self, places: Iterable[Place], work: Callable[[], Awaitable[Mapping[bytes, R]]]) -> Flight[R]:
        """To be waited for by `wait`, without an await in between."""

        async def run() -> Mapping[bytes, R]:
            return await work()

        flight = Flight(tuple(places), asyncio.create_task(run()))
        self._all.add(flight)
        self._by_place |= dict.fromkeys(flight.places, flight)
        flight.task.add_done_callback(lambda _: self._end(flight))
        return flight

    async def wait(self, flights: Iterable[Flight[R]]) -> None:
        """Returns when all have ended, whichever way. One that nobody waits for any more is ended."""
        held = tuple(flights)
        for flight in held:
            flight.waiting += 1
        try:
            if held:
                await asyncio.wait([flight.task for flight in held])
        finally:
            given_up = []
            for flight in held:
                flight.waiting -= 1
                if not flight.waiting and not flight.task.done():
                    given_up.append(flight.task)
            await cancelled(*given_up)

    def _end(self, flight: Flight[R]) -> None:
        self._all.discard(flight)
        for place in flight.places:
            if self._by_place.get(place) is flight:
                del self._by_place[place]
        if not flight.task.cancelled():
            flight.task.exception()  # told to those who wait
