"""Bounded admission: so many choices run, so many requests wait, all others are told when to come again."""

from __future__ import annotations

import asyncio
import time

import pytest

from pdbus.context import Deadline
from pdbus.errors import DeadlineExceeded, Overloaded, PdbusError, Unavailable
from pdbus.router.admission import Admission
from pdbus.router.demand import Demand
from pdbus.router.throughput import Throughput


async def _hold(admission: Admission, weight: int, release: asyncio.Event, seconds: float = 30) -> None:
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
        async with admission.slot(1, Deadline.after(30)):
            pass
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1
    release.set()
    await asyncio.gather(*tasks)
    assert (admission.running, admission.waiting) == (0, 0)


async def test_slots_go_in_the_order_of_asking():
    admission, order = Admission(1, 10), []

    async def take(number: int) -> None:
        async with admission.slot(1, Deadline.after(30)):
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
    async with admission.slot(9, Deadline.after(30)):
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
    await asyncio.wait_for(admission.wait_idle(), 30)


def _demand(tenant: str, priority: int = 5, cost: float = 1.0, size: int = 0) -> Demand:
    return Demand(tenant, priority, cost, size)


class _Crowd:
    """Requests that hold their slots until they are let go."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.order: list[str] = []
        self.refused: list[tuple[str, BaseException]] = []
        self.release = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, demand: Demand, times: int = 1, seconds: float = 50.0) -> list[asyncio.Task[None]]:
        new = [asyncio.create_task(self._one(demand, seconds)) for _ in range(times)]
        self.tasks += new
        await _settle()
        return new

    async def _one(self, demand: Demand, seconds: float) -> None:
        try:
            async with self.admission.slot(1, Deadline.after(seconds), demand):
                self.order.append(demand.tenant)
                await self.release.wait()
        except PdbusError as error:
            self.refused.append((demand.tenant, error))

    async def end(self) -> None:
        self.release.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert (self.admission.running, self.admission.waiting, self.admission.waiting_bytes) == (0, 0, 0)


async def test_a_flood_leaves_slots_for_others():
    crowd = _Crowd(Admission(64, 200))
    await crowd.ask(_demand("flood"), 150)
    assert 50 <= crowd.admission.running < 64
    await crowd.ask(_demand("quiet"), 3)
    assert crowd.order[-3:] == ["quiet"] * 3
    await crowd.end()


async def test_who_waits_less_goes_before_a_flood_and_the_higher_priority_before_all():
    crowd = _Crowd(Admission(1, 200))
    await crowd.ask(_demand("flood"), 20)
    await crowd.ask(_demand("quiet"))
    await crowd.ask(_demand("flood", priority=9))
    crowd.release.set()
    await _settle()
    await crowd.end()
    assert crowd.order[1] == "flood"
    assert "quiet" in crowd.order[2:4]


async def test_where_the_queue_is_full_the_flood_s_newest_goes_and_not_the_quiet_one():
    crowd = _Crowd(Admission(1, 10))
    await crowd.ask(_demand("flood"), 11)
    await crowd.ask(_demand("quiet"))
    assert [tenant for tenant, _ in crowd.refused] == ["flood"]
    await crowd.ask(_demand("flood"), 5)
    assert [tenant for tenant, _ in crowd.refused] == ["flood"] * 6
    assert all(isinstance(error, Overloaded) and error.retry_after_s for _, error in crowd.refused)
    await crowd.end()
    assert crowd.order.count("quiet") == 1


async def test_the_queue_is_bounded_in_bytes_too():
    crowd = _Crowd(Admission(1, 1000, most_bytes=100))
    await crowd.ask(_demand("a"))
    await crowd.ask(_demand("a", size=40), 5)
    assert (crowd.admission.waiting, crowd.admission.waiting_bytes, len(crowd.refused)) == (2, 80, 3)
    await crowd.end()


async def test_the_fleet_s_slots_count_and_more_of_them_are_noticed():
    slots = 2
    crowd = _Crowd(Admission(100, 10, fleet_slots=lambda: slots))
    await crowd.ask(_demand("a"), 5)
    assert (crowd.admission.running, crowd.admission.waiting) == (2, 3)
    slots = 4
    async with asyncio.timeout(30):
        while crowd.admission.waiting > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await crowd.end()


class _Fleet:
    """So many choices at work make `rate` together."""

    def __init__(self, choices: int, rate: float) -> None:
        self.now, self.throughput = 0.0, Throughput()
        self.worked(choices, rate)

    def worked(self, choices: int, rate: float) -> None:
        """All of them ended once more, each of a cost of 10."""
        self.throughput.at_work(choices, self.now)
        begun = [self.throughput.begin(10, self.now) for _ in range(choices)]
        self.now += 10 * choices / rate
        for one in begun:
            self.throughput.end(one, self.now, whole=True)
        self.throughput.at_work(0, self.now)

    def admission(self, slots: int) -> Admission:
        return Admission(slots, 1000, throughput=self.throughput, now=lambda: self.now)


async def test_who_could_not_be_answered_in_time_is_refused_at_once_with_the_time_after_which_it_could():
    crowd = _Crowd(_Fleet(8, 100.0).admission(8))
    await crowd.ask(_demand("a", cost=100.0), 8)  # 8 s each, all together; 10.8 s are counted on
    await crowd.ask(_demand("a", cost=100.0), 4, seconds=30.0)  # 4 s of waiting, at most
    assert (crowd.admission.waiting, crowd.refused) == (4, [])
    await crowd.ask(_demand("a", cost=100.0), seconds=11.8)
    ((_, error),) = crowd.refused
    assert isinstance(error, Overloaded)
    assert 3.0 <= (error.retry_after_s or 0) <= 3.0 * 1.5 + 1.2
    await crowd.ask(_demand("a", cost=100.0), seconds=15.0)
    assert len(crowd.refused) == 1
    await crowd.end()


async def test_those_that_are_refused_together_are_not_told_to_come_back_together():
    crowd = _Crowd(_Fleet(8, 100.0).admission(8))
    await crowd.ask(_demand("a", cost=100.0), 8)
    await crowd.ask(_demand("a", cost=100.0), 20, seconds=2.0)
    times = [error.retry_after_s for _, error in crowd.refused if isinstance(error, Overloaded)]
    assert len(times) == 20
    assert max(times) - min(times) > 1.0  # type: ignore[type-var, operator]
    await crowd.end()


async def test_a_deadline_that_nothing_could_keep_is_told_apart():
    fleet = _Fleet(8, 100.0)
    admission = fleet.admission(8)
    fleet.worked(1, 10.0)
    crowd = _Crowd(admission)
    await crowd.ask(_demand("a", cost=1.0))
    with pytest.raises(DeadlineExceeded, match="at the very least"):
        admission.check(_demand("a", cost=10_000.0), Deadline.after(40.0))
    with pytest.raises(Overloaded):
        admission.check(_demand("a", cost=10_000.0), Deadline.after(60.0))
    await crowd.end()


async def test_who_has_nobody_beside_it_is_tried_whatever_was_measured():
    async with _Fleet(8, 0.001).admission(8).slot(1, Deadline.after(30.0), _demand("a", cost=100.0)):
        pass


async def test_who_has_waited_too_long_is_refused_when_its_turn_comes():
    fleet = _Fleet(8, 100.0)
    crowd = _Crowd(fleet.admission(8))
    await crowd.ask(_demand("a", cost=100.0), 8)
    await crowd.ask(_demand("b", cost=1.0), 1, seconds=50.0)
    late = await crowd.ask(_demand("a", cost=100.0), 1, seconds=14.0)
    assert not crowd.refused
    fleet.worked(8, 2.0)  # it has become much slower
    crowd.release.set()
    await asyncio.gather(*late)
    assert [tenant for tenant, _ in crowd.refused] == ["a"]
    await crowd.end()


async def test_a_refusal_is_quick():
    """Goal: 1 ms, of the processor's time: what else the machine has to do decides nothing."""
    crowd = _Crowd(_Fleet(8, 100.0).admission(8))
    await crowd.ask(_demand("a", cost=100.0), 8)
    for tenant in range(50):
        await crowd.ask(_demand(f"t{tenant}", cost=10.0), 2)
    begun = time.process_time()
    for _ in range(200):
        with pytest.raises(Overloaded):
            crowd.admission.check(_demand("a", cost=100.0), Deadline.after(1.0))
    assert (time.process_time() - begun) / 200 < 1e-3
    await crowd.end()
