"""However an attempt ends whose prompt is read by its decode worker: everything that it held is free (G8)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from pdbus.errors import Cancelled, DeadlineExceeded, Overloaded, StaleAttempt, TooLarge, Unavailable
from pdbus.messages.common import Ticket
from pdbus.messages.workers import Cancel
from pdbus.model.backend import Model
from pdbus.model.backends import EngineName
from tests.support.asking import ids, refused, until
from tests.support.llama import Runner
from tests.support.ring import fleet_of
from tests.support.workers import LocalSource, NewBus, Rig, held_after, paused, prompt_of, rig


async def cancelled(rig: Rig, ticket: Ticket) -> None:
    await rig.router.cancel(ticket)
    await rig.router.cancelled_by(ticket, {rig.router.decode})


class SlowRing:
    """A cache node whose answers don't come."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def read_prefix(self, *parts: object, **options: object) -> int:
        self.asked.set()
        await asyncio.sleep(60)
        return 0


async def test_cancelled_before_it_came_or_in_the_moment_in_which_it_is_taken(workers: Rig) -> None:
    router = workers.router
    ticket = router.ticket(prompt_of(50))
    await cancelled(workers, ticket)
    assert isinstance(await refused(router.run_local(ticket)), Cancelled)
    taken = router.ticket(prompt_of(50))
    await router.run_local(taken)
    workers.decode._on_cancel(Cancel(taken.request_id, 1, router.id, (router.decode,)))
    await router.cancelled_by(taken, {router.decode})
    await workers.until_idle()


async def test_cancelled_while_it_queues(workers: Rig) -> None:
    ticket = workers.router.ticket(prompt_of(50))
    with paused(workers.decode):
        await workers.router.run_local(ticket)
        assert workers.decode.load().backlog_tokens == 50
        await workers.router.cancel(ticket)
    await workers.router.cancelled_by(ticket, {workers.router.decode})
    await workers.until_idle()
    assert workers.decode.load().backlog_tokens == 0


async def test_cancelled_while_its_prefix_is_looked_up(workers: Rig, model: Model) -> None:
    router, tier, ring = workers.router, workers.decode.l2, SlowRing()
    tier._ring, tier._fleet = ring, fleet_of(1)  # type: ignore[assignment]
    ticket = router.ticket(prompt_of(100))
    await router.run_local(ticket)
    await ring.asked.wait()
    assert workers.decode.load().pages_used == 7
    await cancelled(workers, ticket)
    await workers.until_idle()
    tier._fleet = fleet_of(0)
    again = router.ticket(prompt_of(60, seed=5))
    assert ids(await router.answer_local(again)) == Runner(model).greedy(list(again.prompt), 8)


async def test_its_deadline_passes_while_its_prefix_is_looked_up(workers: Rig) -> None:
    router, tier, ring = workers.router, workers.decode.l2, SlowRing()
    tier._ring, tier._fleet = ring, fleet_of(1)  # type: ignore[assignment]
    while not ring.asked.is_set():  # a busy machine may need all of that time before it looks anything up
        ticket = router.ticket(prompt_of(100), deadline_ns=time.time_ns() + 300_000_000)
        router_error = asyncio.create_task(refused(router.answer_local(ticket)))
        await until(lambda: ring.asked.is_set() or router_error.done())  # noqa: B023
    await until(lambda: not workers.decode.core.running)  # the engine has let go of it, the look-up has not
    assert workers.decode.load().pages_used == 7
    workers.decode._on_cancel(Cancel(ticket.request_id, 1, router.id, (router.decode,)))
    await workers.until_idle()
    router_error.cancel()


async def test_cancelled_in_mid_prompt(workers: Rig, model: Model) -> None:
    router = workers.router
    ticket = router.ticket(prompt_of(400))
    with held_after(workers.decode, 0) as there:
        await router.run_local(ticket)
        await until(there.is_set)
        await router.cancel(ticket)
        await until(lambda: all(one.cancelled for one in workers.decode.core._scheduler.all))
    await router.cancelled_by(ticket, {router.decode})
    await workers.until_idle()
    assert router.of(ticket) == []
    again = router.ticket(prompt_of(60, seed=5))
    assert ids(await router.answer_local(again)) == Runner(model).greedy(list(again.prompt), 8)


async def test_cancelled_while_it_is_answered(workers: Rig) -> None:
    router = workers.router
    ticket = router.ticket(prompt_of(30), 480)
    with held_after(workers.decode, 8):
        await router.run_local(ticket)
        await router.until(lambda: len(router.of(ticket)) > 5)
        await router.cancel(ticket)
        await until(lambda: all(one.cancelled for one in workers.decode.core._scheduler.all))
    await router.cancelled_by(ticket, {router.decode})
    await workers.until_idle()
    assert len(router.of(ticket)) < 480
    assert isinstance(await refused(router.run_local(ticket)), Cancelled)


async def test_the_deadline_ends_it_in_the_prompt_and_in_the_answer(workers: Rig) -> None:
    router = workers.router
    for prompt, passes in ((prompt_of(400), 1), (prompt_of(20, seed=4), 4)):
        ticket = router.ticket(prompt, 490, deadline_ns=time.time_ns() + 250_000_000)
        with held_after(workers.decode, passes):
            answer = asyncio.create_task(refused(router.answer_local(ticket)))
            await until(lambda: time.time_ns() > ticket.deadline_ns)  # noqa: B023
        assert isinstance(await answer, DeadlineExceeded)
    await workers.until_idle()


async def test_a_newer_attempt_ends_it(workers: Rig, model: Model) -> None:
    router = workers.router
    old = router.ticket(prompt_of(60), 300)
    await router.run_local(old)
    await router.until(lambda: len(router.of(old)) > 2)
    new = router.ticket(prompt_of(60), 8, request_id=old.request_id, attempt=2)
    assert ids(await router.answer(new)) == Runner(model).greedy(list(old.prompt), 8)
    await workers.until_idle()
    assert isinstance(await refused(router.run_local(old)), StaleAttempt)


async def test_a_router_that_is_gone_frees_it(workers: Rig) -> None:
    orphan = workers.router.ticket(prompt_of(20), 480, router="never-there")
    with held_after(workers.decode, 4):  # so that it does not end by itself
        await workers.router.run_local(orphan)
        await until(lambda: all(job.stopping for job in workers.decode.jobs))
    await workers.until_idle()


async def test_a_worker_that_stops_says_so(twin: NewBus, source: LocalSource, unique: Callable[[str], str]) -> None:
    async with rig(twin, source, name=unique("tiny")) as workers:
        router, ticket = workers.router, workers.router.ticket(prompt_of(40), 400)
        with held_after(workers.decode, 5):
            await router.run_local(ticket)
            await router.until(lambda: len(router.of(ticket)) > 2)
            ending = asyncio.create_task(workers.decode._end_jobs())
            await until(lambda: all(job.stopping for job in workers.decode.jobs))
        await ending
        assert isinstance(await refused(router.rest(ticket)), Unavailable)
        await workers.until_idle()


async def test_a_prompt_larger_than_the_pool_is_refused_for_good(
    twin: NewBus, source: LocalSource, unique: Callable[[str], str]
) -> None:
    async with rig(twin, source, name=unique("tiny"), pages=4) as workers:
        error = await refused(workers.router.answer_local(workers.router.ticket(prompt_of(100))))
        assert isinstance(error, TooLarge)
        await workers.until_idle()


@pytest.mark.parametrize("swap_pages", [0, 60])
async def test_prompts_and_answers_that_outgrow_the_pool_end_or_go_on_where_they_were(
    twin: NewBus,
    source: LocalSource,
    model: Model,
    unique: Callable[[str], str],
    engine: EngineName,
    swap_pages: int,
) -> None:
    async with rig(twin, source, name=unique("tiny"), decode_pages=14, swap_pages=swap_pages, engine=engine) as workers:
        router = workers.router
        tickets = [router.ticket(prompt_of(40, seed), 40) for seed in range(6)]
        asked = [(router.answer_local if at % 2 else router.answer)(one) for at, one in enumerate(tickets)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for ticket, items in zip(tickets, answers, strict=True):
            if isinstance(items, BaseException):
                assert isinstance(items, Overloaded)
                assert not swap_pages
            else:
                assert ids(items) == Runner(model).greedy(list(ticket.prompt), 40)
        assert sum(not isinstance(one, BaseException) for one in answers) >= 2
        await workers.until_idle()


async def test_a_burst_of_cancels_leaves_nothing_and_the_next_answer_comes_soon(workers: Rig, model: Model) -> None:
    router = workers.router
    tickets = [router.ticket(prompt_of(300, seed), 50) for seed in range(12)]
    await asyncio.gather(*(router.run_local(ticket) for ticket in tickets))
    await asyncio.gather(*(cancelled(workers, ticket) for ticket in tickets))
    await workers.until_idle()
    probe = router.ticket(prompt_of(20))
    async with asyncio.timeout(30):
        assert ids(await router.answer_local(probe)) == Runner(model).greedy(list(probe.prompt), 8)
