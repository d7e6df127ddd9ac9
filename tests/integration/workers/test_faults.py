"""Peers that die and memory that runs out: each ends its own attempt, frees it, and disturbs no other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pdbus.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from pdbus.model.backend import Model
from pdbus.model.backends import EngineName
from tests.support.asking import ids, refused, until
from tests.support.llama import Runner
from tests.support.workers import LocalSource, NewBus, Rig, held_after, paused, prompt_of, receiving, rig, silence


async def test_the_deadline_ends_an_answer_in_its_middle(workers: Rig) -> None:
    router = workers.router
    ticket = router.ticket(prompt_of(20), 490, deadline_ns=time.time_ns() + 300_000_000)
    with held_after(workers.decode, 4):
        answer = asyncio.create_task(refused(router.answer(ticket)))
        await until(lambda: time.time_ns() > ticket.deadline_ns)
    assert isinstance(await answer, DeadlineExceeded)
    await workers.until_idle()


async def test_a_prefill_worker_that_dies_frees_its_lease(workers: Rig) -> None:
    """LESSONS 1 and 7: known within the time that presence takes, told as retryable."""
    ticket = workers.router.ticket(prompt_of(400))
    with held_after(workers.prefill, 1):
        await workers.router.start(ticket)
        await until(lambda: receiving(workers))
        silence(workers.prefill.bus)
        assert workers.decode.load().leases == 1
        assert isinstance(await refused(workers.router.rest(ticket)), Unavailable)
        await until(lambda: not workers.decode.jobs)
    await workers.until_idle()


async def test_a_router_that_is_gone_frees_its_work(workers: Rig) -> None:
    """After 3 s without its presence. Another router's work goes on."""
    router = workers.router
    orphan, other = router.ticket(prompt_of(20), 480, router="never-there"), router.ticket(prompt_of(20), 300)
    await router.start(orphan)
    await router.run_decode(router.ticket(prompt_of(20), router="never-there"))  # it would wait for its prompt
    await router.answer(other)
    await workers.until_idle()


async def test_pages_that_run_out_cost_the_youngest_answer(
    new_bus: NewBus, source: LocalSource, model: Model, unique: Callable[[str], str], engine: EngineName
) -> None:
    """It is told as overloaded, so that the router goes on with it elsewhere; the older one is not disturbed."""
    async with rig(new_bus, source, name=unique("tiny"), decode_pages=12, engine=engine) as workers:
        router = workers.router
        old, young = router.ticket(prompt_of(64), 100), router.ticket(prompt_of(48, 1), 100)
        await asyncio.gather(router.run_prefill(old), router.run_prefill(young))
        await until(lambda: [job.peer for job in workers.decode.jobs] == [None, None])  # both are handed over
        with paused(workers.decode):
            await router.run_decode(old)
            await router.run_decode(young)
        assert isinstance(await refused(router.rest(young)), Overloaded)
        assert ids(await router.rest(old)) == Runner(model).greedy(list(old.prompt), 100)
        await workers.until_idle()


async def test_a_full_decode_worker_is_waited_for(
    new_bus: NewBus, source: LocalSource, model: Model, unique: Callable[[str], str], engine: EngineName
) -> None:
    """While it is full, prefill asks again; requests behind are not blocked by it."""
    async with rig(new_bus, source, name=unique("tiny"), decode_pages=10, engine=engine) as workers:
        router = workers.router
        tickets = [router.ticket(prompt_of(100, seed), 20) for seed in range(4)]
        answers = await asyncio.gather(*(router.answer(ticket) for ticket in tickets))
        assert [ids(items) for items in answers] == [Runner(model).greedy(list(t.prompt), 20) for t in tickets]
        await workers.until_idle()


async def test_a_prompt_larger_than_the_pool_is_refused_for_good(
    new_bus: NewBus, source: LocalSource, unique: Callable[[str], str]
) -> None:
    async with rig(new_bus, source, name=unique("tiny"), pages=4) as workers:
        assert isinstance(await refused(workers.router.answer(workers.router.ticket(prompt_of(100)))), InvalidRequest)
        await workers.until_idle()


async def test_a_queue_has_an_end(new_bus: NewBus, source: LocalSource, unique: Callable[[str], str]) -> None:
    async with rig(new_bus, source, name=unique("tiny")) as workers:
        workers.prefill.jobs._most = 2
        tickets = [workers.router.ticket(prompt_of(100, seed)) for seed in range(3)]
        with paused(workers.prefill):
            await workers.router.run_prefill(tickets[0])
            await workers.router.run_prefill(tickets[1])
            assert isinstance(await refused(workers.router.run_prefill(tickets[2])), Overloaded)
            for ticket in tickets[:2]:
                await workers.router.cancel(ticket)
        await workers.until_idle()
        await workers.router.answer(workers.router.ticket([5, 6]))


async def test_leaving_tells_routers_to_go_elsewhere(
    new_bus: NewBus, source: LocalSource, unique: Callable[[str], str]
) -> None:
    async with rig(new_bus, source, name=unique("tiny")) as workers:
        ticket = workers.router.ticket(prompt_of(400))
        with held_after(workers.prefill, 1):
            await workers.router.start(ticket)
            await until(lambda: receiving(workers))
            leaving = asyncio.create_task(workers.kill_prefill())
            await until(lambda: all(job.stopping for job in workers.prefill.jobs))
        await leaving
        assert isinstance(await refused(workers.router.rest(ticket)), Unavailable)
        await until(lambda: not workers.decode.jobs)
        assert isinstance(await refused(workers.router.run_prefill(ticket)), Unavailable)
