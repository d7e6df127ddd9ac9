"""Cancel at every state frees everything at once, is answered, and keeps late messages out (LESSONS 9, 10; G8).

Of preempted answers: test_preempted.py; of requests in a router's queue: tests/integration/router/test_overload.py.
"""

from __future__ import annotations

import asyncio

import pytest

from pdbus.context import RequestContext
from pdbus.errors import Cancelled, StaleAttempt
from pdbus.messages.common import Ticket
from pdbus.messages.decode import DecodeRun
from pdbus.messages.prefill import PrefillRun
from pdbus.messages.workers import Cancel
from pdbus.model.backend import Model
from tests.support.asking import ids, refused, until
from tests.support.llama import Runner
from tests.support.workers import Rig, held_after, paused, prompt_of, receiving, silence


async def cancelled(rig: Rig, ticket: Ticket) -> None:
    """Cancels as a router does: repeatedly, until both have answered."""
    await rig.router.cancel(ticket)
    await rig.router.cancelled_by(ticket, {rig.router.prefill, rig.router.decode})


async def test_before_anything_came(workers: Rig) -> None:
    ticket = workers.router.ticket(prompt_of(50))
    await cancelled(workers, ticket)
    assert isinstance(await refused(workers.router.run_prefill(ticket)), Cancelled)
    assert isinstance(await refused(workers.router.run_decode(ticket)), Cancelled)


async def test_in_the_moment_in_which_it_is_taken(workers: Rig) -> None:
    """The job's task has not taken its first step."""
    router = workers.router
    ticket, ctx = router.ticket(prompt_of(50)), RequestContext.after(30)
    await workers.prefill.take_run(PrefillRun(ticket, router.decode), ctx)
    await workers.decode.take_run(DecodeRun(ticket, router.prefill), ctx)
    for worker in (workers.prefill, workers.decode):
        assert len(worker.jobs) == 1
        worker._on_cancel(Cancel(ticket.request_id, 1, router.id, (worker.id,)))
    await router.cancelled_by(ticket, {router.prefill, router.decode})
    await workers.until_idle()


async def test_while_it_queues(workers: Rig) -> None:
    ticket = workers.router.ticket(prompt_of(50))
    with paused(workers.prefill):
        await workers.router.start(ticket)
        await workers.router.cancel(ticket)
        await until(lambda: workers.router.news.is_set())
    await workers.router.cancelled_by(ticket, {workers.router.prefill, workers.router.decode})
    await workers.until_idle()
    assert workers.router.of(ticket) == []


async def test_while_a_chunk_is_computed(workers: Rig) -> None:
    """The pass is given up, and nothing of it is counted or told."""
    ticket = workers.router.ticket(prompt_of(400))
    with held_after(workers.prefill, 0) as there:
        await workers.router.start(ticket)
        await until(there.is_set)
        await workers.router.cancel(ticket)
        await until(lambda: all(job.stopping for job in workers.prefill.jobs))
    await workers.router.cancelled_by(ticket, {workers.router.prefill, workers.router.decode})
    await workers.until_idle()
    assert workers.router.of(ticket) == []


async def test_when_only_decode_knows_of_it(workers: Rig) -> None:
    ticket = workers.router.ticket(prompt_of(50))
    await workers.router.run_decode(ticket)
    await cancelled(workers, ticket)
    await workers.until_idle()


async def test_in_the_middle_of_the_hand_over(workers: Rig, model: Model) -> None:
    ticket = workers.router.ticket(prompt_of(400))
    with held_after(workers.prefill, 1):
        await workers.router.start(ticket)
        await until(lambda: receiving(workers))
        assert workers.decode.load().leases == 1
        await workers.router.cancel(ticket)
        await until(lambda: not workers.decode.jobs)  # at once, without prefill's help
    await workers.router.cancelled_by(ticket, {workers.router.prefill, workers.router.decode})
    await workers.until_idle()
    # The pages that it was written to are used again, and hold what belongs there.
    again = workers.router.ticket(prompt_of(60, seed=5))
    assert ids(await workers.router.answer(again)) == Runner(model).greedy(list(again.prompt), 8)


async def test_in_the_hand_over_and_then_prefill_dies(workers: Rig) -> None:
    """LESSONS 1: decode's lease is its own, and waits for no word of a peer that is gone."""
    ticket = workers.router.ticket(prompt_of(400))
    with held_after(workers.prefill, 1):
        await workers.router.start(ticket)
        await until(lambda: receiving(workers))
        silence(workers.prefill.bus)
        await workers.router.cancel(ticket)
        await workers.router.cancelled_by(ticket, {workers.router.decode})
        await until(lambda: not workers.decode.jobs and not workers.decode.load().pages_used)
    assert workers.decode.load().leases == 0
    await workers.until_idle()


async def test_while_it_is_decoded(workers: Rig) -> None:
    ticket = workers.router.ticket(prompt_of(30), 400)
    with held_after(workers.decode, 8):
        await workers.router.start(ticket)
        await workers.router.until(lambda: len(workers.router.of(ticket)) > 5)
        await workers.router.cancel(ticket)
        await until(lambda: all(job.stopping for job in workers.decode.jobs))
    await cancelled(workers, ticket)
    await workers.until_idle()
    assert len(workers.router.of(ticket)) < 400
    assert isinstance(await refused(workers.router.run_decode(ticket)), Cancelled)


async def test_of_one_choice_leaves_the_others_alone(workers: Rig) -> None:
    router = workers.router
    first = router.ticket(prompt_of(30), 200)
    second = router.ticket(prompt_of(30), 200, request_id=first.request_id, choice=1)
    await asyncio.gather(router.start(first), router.start(second))
    await router.until(lambda: bool(router.of(first)) and bool(router.of(second)))
    await cancelled(workers, first)
    assert len(ids(await router.rest(second))) == 200


async def test_of_an_attempt_that_nobody_holds_is_answered(workers: Rig) -> None:
    await cancelled(workers, workers.router.ticket([5, 6]))


async def test_a_newer_attempt_ends_the_older_one(workers: Rig, model: Model) -> None:
    router = workers.router
    old = router.ticket(prompt_of(60), 300)
    await router.start(old)
    await router.until(lambda: len(router.of(old)) > 2)
    new = router.ticket(prompt_of(60), 8, request_id=old.request_id, attempt=2)
    assert ids(await router.answer(new)) == Runner(model).greedy(list(old.prompt), 8)
    await workers.until_idle()
    assert isinstance(await refused(router.run_prefill(old)), StaleAttempt)
    assert isinstance(await refused(router.run_decode(old)), StaleAttempt)


async def test_finished_is_not_answered_and_forgets_what_was_kept(workers: Rig) -> None:
    router = workers.router
    ticket = router.ticket(prompt_of(20))
    await router.answer(ticket)
    await router.cancel(ticket, "finished")
    await until(lambda: not len(workers.prefill.emitter.outbox) and not len(workers.decode.emitter.outbox))
    assert not any(item.finish == "cancelled" for item in router.items)


@pytest.mark.parametrize("burst", [12])
async def test_a_burst_of_cancels_leaves_nothing_and_the_next_answer_comes_soon(
    workers: Rig, model: Model, burst: int
) -> None:
    router = workers.router
    tickets = [router.ticket(prompt_of(300, seed), 50) for seed in range(burst)]
    await asyncio.gather(*(router.start(ticket) for ticket in tickets))
    await asyncio.gather(*(cancelled(workers, ticket) for ticket in tickets))
    await workers.until_idle()
    probe = router.ticket(prompt_of(20))
    async with asyncio.timeout(30):
        assert ids(await router.answer(probe)) == Runner(model).greedy(list(probe.prompt), 8)
