"""How many choices run at once, who of those that wait is next, and who is refused at once.

a free slot      of `slots`, or of as many as the fleet has (router/workers.py): a request takes one for each choice
who is next      router/fair_queue.py. So that a tenant's flood leaves room for others, no tenant takes a slot unless
                 what it holds stays within `_AGAINST_FREE` times what is free (dynamic thresholds: Choudhury and
                 Hahne, 1998)
who may wait     bounded in requests and in bytes; beyond it goes whoever has most waiting in the lowest priority
who is refused   whose deadline would pass before the answer is whole, as far as is known (router/throughput.py):
                 when it comes, and again when its turn comes; before any of its text is read by a tokenizer
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pdbus.context import Deadline
from pdbus.errors import DeadlineExceeded, Overloaded, PdbusError, Unavailable
from pdbus.router.demand import Demand
from pdbus.router.fair_queue import Entry, FairQueue
from pdbus.router.held import Held
from pdbus.router.throughput import MARGIN, Begun, Throughput

_AGAINST_FREE = 8
_LOOK_AGAIN_S = 0.25
"""While some wait: the fleet's slots change without a word."""


@dataclass(eq=False, slots=True)
class _Waiter:
    demand: Demand
    weight: int
    deadline: Deadline
    granted: asyncio.Future[Begun]


class Admission:
    """Used from one event loop."""

    def __init__(
        self,
        slots: int,
        most_waiting: int,
        *,
        most_bytes: int = 64 << 20,
        fleet_slots: Callable[[], int | None] = lambda: None,
        throughput: Throughput | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        """`fleet_slots`: how many the fleet has for this router now; None: that is not known."""
        self._throughput = throughput or Throughput()
        self._most_slots, self._fleet_slots = slots, fleet_slots
        self._most_waiting, self._most_bytes = most_waiting, most_bytes
        self._now = now or time.monotonic
        self._rng = random.Random()  # noqa: S311 - spreads those that come again
        self._held = Held()
        self._queue: FairQueue[_Waiter] = FairQueue()
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Slots taken."""
        return self._held.total

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting_bytes(self) -> int:
        return self._bytes

    async def wait_idle(self) -> None:
        """Returns when nothing runs."""
        await self._idle.wait()

    def close(self) -> None:
        """No new requests; those that wait are refused, those that run go on."""
        self._closed = True
        for entry in list(self._queue):
            self._refuse(entry, _closing())

    def check(self, demand: Demand, deadline: Deadline, weight: int = 1) -> None:
        """Raises at once what `slot` would be certain to raise soon: for a request of which only the size is known."""
        if self._closed:
            raise _closing()
        self._check_deadline(demand, deadline, weight)
        full = self.waiting >= self._most_waiting or self._bytes + demand.size_bytes > self._most_bytes
        if full and self.waiting:
            last = self._queue.last()
            if (last.priority, last.tenant) == (demand.priority, demand.tenant) or last.priority > demand.priority:
                raise self._overloaded(demand)

    @asynccontextmanager
    async def slot(self, weight: int, deadline: Deadline, demand: Demand | None = None) -> AsyncIterator[None]:
        """Holds `weight` slots (the request's choices; at most all there are).

        Raises Overloaded with the time after which to try again, Unavailable while closing, DeadlineExceeded."""
        demand = demand or Demand()
        self.check(demand, deadline, weight)
        weight = min(weight, self._most_slots)
        begun = await self._take(_Waiter(demand, weight, deadline, asyncio.get_running_loop().create_future()))
        try:
            yield
            self._throughput.end(begun, self._now(), whole=True)
        except DeadlineExceeded:
            self._throughput.end(begun, self._now(), whole=False)
            raise
        finally:
            self._give_back(demand.tenant, weight)

    async def _take(self, waiter: _Waiter) -> Begun:
        demand = waiter.demand
        entry = Entry(demand.tenant, demand.priority, waiter.weight * max(demand.cost, 1.0), waiter)
        self._queue.push(entry)
        self._bytes += demand.size_bytes
        try:
            self._grant()
            while len(self._queue) > self._most_waiting or self._bytes > self._most_bytes:
                self._refuse(last := self._queue.last(), self._overloaded(last.item.demand))
            if waiter.granted.done():
                return waiter.granted.result()
            self._look_again()
            async with waiter.deadline.timeout():
                return await waiter.granted
        except BaseException as error:
            granted = waiter.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._give_back(demand.tenant, waiter.weight)  # granted in the same turn
            else:
                self._forget(entry)
                self._grant()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the deadline passed while the request waited for its turn") from None
            raise

    def _give_back(self, tenant: str, weight: int) -> None:
        self._count(tenant, -weight)
        self._grant()

    def _count(self, tenant: str, weight: int) -> None:
        self._held.add(tenant, weight)
        self._throughput.at_work(self._held.total, self._now())
        if self._held.total:
            self._idle.clear()
        else:
            self._idle.set()

    def _grant(self) -> None:
        while entry := self._next():
            waiter = entry.item
            self._queue.serve(entry)
            self._bytes -= waiter.demand.size_bytes
            self._count(entry.tenant, waiter.weight)
            waiter.granted.set_result(self._throughput.begin(waiter.demand.cost, self._now()))

    def _next(self) -> Entry[_Waiter] | None:
        """Who gets its slots now."""
        slots = self._slots
        for entry in list(self._queue.in_order()):
            waiter, held = entry.item, self._held.of(entry.tenant)
            weight, free = min(waiter.weight, slots), slots - self._held.total
            if waiter.granted.done():  # it was cancelled, and its owner has not had a turn yet
                continue
            if held and held + weight > _AGAINST_FREE * free:
                continue  # what is free is for others
            if weight > free:
                return None  # nobody overtakes it, or it would never have its turn
            late_s = self._late_s(waiter.demand, waiter.weight, waiter.deadline, 0.0)
            if late_s > 0:
                self._refuse(entry, self._overloaded(waiter.demand, late_s))
                return self._next()
            return entry
        return None

    @property
    def _slots(self) -> int:
        known = self._fleet_slots()
        return self._most_slots if known is None else max(min(known, self._most_slots), 1)

    def _check_deadline(self, demand: Demand, deadline: Deadline, weight: int) -> None:
        deadline.check("the request could be admitted")
        least_s = self._throughput.least_s(demand.cost, self._now())
        if self._held.total and least_s > deadline.remaining_s:
            raise DeadlineExceeded(f"the answer takes {least_s:.1f} s at the very least; the deadline leaves less")
        late_s = self._late_s(demand, weight, deadline, self._queue.ahead(demand.tenant, demand.priority))
        if late_s > 0:
            raise self._overloaded(demand, late_s)

    def _late_s(self, demand: Demand, weight: int, deadline: Deadline, ahead: float) -> float:
        """By how much the deadline would be missed; 0 where it is met, or nothing is known.

        What has nobody beside it is always tried: otherwise a wrong measure would never be put right. Beside another's
        flood it has its tenant's share of all there is, as workers see to (engine/tenants.py)."""
        if not self._held.total and not ahead:
            return 0.0
        known, held, now, beside = self._throughput, self._held, self._now(), self._beside(weight)
        rate = known.rate(beside, now)
        if not rate:
            return 0.0
        takes_s = known.seconds(demand.cost * beside / rate, now)
        if held.beside_flood(demand.tenant, weight):
            share = rate / held.tenants(demand.tenant) / (held.of(demand.tenant) + weight)
            takes_s = min(takes_s, demand.cost / share * MARGIN)
        return max(ahead / rate + takes_s - deadline.remaining_s, 0.0)

    def _beside(self, weight: int) -> int:
        """Choices that will be at work together, with so many more."""
        return min(self._slots, self._held.total + len(self._queue) + weight)

    def _overloaded(self, demand: Demand, late_s: float | None = None) -> Overloaded:
        """With the time after which the same request would be taken, if nothing else came; more or less, so that those
        that are refused together don't come back together."""
        if late_s is None:
            rate = self._throughput.rate(max(self._held.total, 1), self._now())
            ahead = max(self._queue.ahead(demand.tenant, demand.priority), demand.cost)
            late_s = ahead / rate if rate else 1.0
        again_s = late_s * (1 + self._rng.random() / 2) + self._rng.random()
        return Overloaded(f"{self._held.total} choices run and {len(self._queue)} requests wait", retry_after_s=again_s)

    def _refuse(self, entry: Entry[_Waiter], error: PdbusError) -> None:
        self._forget(entry)
        if not entry.item.granted.done():
            entry.item.granted.set_exception(error)

    def _forget(self, entry: Entry[_Waiter]) -> None:
        if self._queue.remove(entry):
            self._bytes -= entry.item.demand.size_bytes

    def _look_again(self) -> None:
        """Sees to it that those who wait are looked at without anybody's asking."""
        if self._timer is None and self._queue:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._looked)

    def _looked(self) -> None:
        self._timer = None
        self._grant()
        self._look_again()


def _closing() -> Unavailable:
    return Unavailable("this router is shutting down", retry_after_s=1.0)
