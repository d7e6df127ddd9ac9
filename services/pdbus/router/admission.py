"""How many choices run at once, and how many requests may wait for that; more are refused at once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdbus.context import Deadline
from pdbus.errors import DeadlineExceeded, Overloaded, Unavailable

_SMOOTHING = 0.2


class Admission:
    """Slots are given in the order of asking. Used from one event loop."""

    def __init__(self, slots: int, most_waiting: int) -> None:
        self._slots = slots
        self._most_waiting = most_waiting
        self._taken = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._usual_s = 1.0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Slots taken."""
        return self._taken

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def wait_idle(self) -> None:
        """Returns when nothing runs."""
        await self._idle.wait()

    def close(self) -> None:
        """No new requests; those that wait are refused, those that run go on."""
        self._closed = True
        for waiter, _ in self._waiting:
            if not waiter.done():
                waiter.set_exception(_closing())

    @asynccontextmanager
    async def slot(self, weight: int, deadline: Deadline) -> AsyncIterator[None]:
        """Holds `weight` slots (the request's choices; at most all there are).

        Raises Overloaded with the time after which to try again, Unavailable while closing, DeadlineExceeded."""
        weight = min(weight, self._slots)
        await self._take(weight, deadline)
        begun = time.monotonic()
        try:
            yield
        finally:
            self._usual_s += _SMOOTHING * (time.monotonic() - begun - self._usual_s)
            self._give_back(weight)

    async def _take(self, weight: int, deadline: Deadline) -> None:
        if self._closed:
            raise _closing()
        if not self._waiting and self._taken + weight <= self._slots:
            self._count(weight)
            return
        if len(self._waiting) >= self._most_waiting:
            raise Overloaded(
                f"{self._taken} choices run and {len(self._waiting)} requests wait", retry_after_s=self._retry_after_s()
            )
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (waiter, weight)
        self._waiting.append(entry)
        try:
            async with deadline.timeout():
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give_back(weight)  # granted in the same turn
            else:
                self._waiting.remove(entry)
                self._grant()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the deadline passed while the request waited for its turn") from None
            raise

    def _give_back(self, weight: int) -> None:
        self._count(-weight)
        self._grant()

    def _count(self, weight: int) -> None:
        self._taken += weight
        if self._taken:
            self._idle.clear()
        else:
            self._idle.set()

    def _grant(self) -> None:
        while self._waiting:
            waiter, weight = self._waiting[0]
            if waiter.done():  # its owner takes itself out when it gets its turn
                return
            if self._taken + weight > self._slots:
                return
            self._waiting.popleft()
            self._count(weight)
            waiter.set_result(None)

    def _retry_after_s(self) -> float:
        """What waits now, at the pace of the last answers."""
        return max(1.0, self._usual_s * (len(self._waiting) + 1) / self._slots)


def _closing() -> Unavailable:
    return Unavailable("this router is shutting down", retry_after_s=1.0)
