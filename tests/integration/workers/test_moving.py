"""A running answer moves from one decode worker to another: the same text, each token once, and nothing stays held."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from pdbus.context import RequestContext
from pdbus.decode.job import DecodeJob
from pdbus.decode.local import LocalJob
from pdbus.decode.worker import DecodeWorker
from pdbus.engine.sequence import Ended, Produced
from pdbus.engine.step import compute
from pdbus.errors import Conflict, InvalidRequest, NotFound, PdbusError, StaleAttempt
from pdbus.messages.common import Sampling, Ticket
from pdbus.messages.decode import Adopt, DecodeRun, PagesWanted
from pdbus.messages.router import TokenItem
from pdbus.messages.workers import Resend
from pdbus.model.backend import Model
from pdbus.model.backends import EngineName
from pdbus.subjects import DECODE_ADOPT, DECODE_PAGES, DECODE_RESEND, DECODE_RUN
from tests.support.asking import ids, refused, until
from tests.support.llama import Runner
from tests.support.workers import LocalSource, NewBus, Rig, paused, prompt_of, rig

SAMPLED = Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2, logprobs=1)
LENGTH = 200
STEP_S, AHEAD_S, AHEAD = 0.003, 0.03, 30
"""A step takes so long at least, and the longer time where the router has not heard of the last so many tokens: so that
no answer has ended before its move has, however quick the engine is or slow all else."""


@pytest.fixture
async def two(
    new_bus: NewBus,
    source: LocalSource,
    unique: Callable[[str], str],
    engine: EngineName,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Rig]:
    produced, heard = 0, list[TokenItem]()

    def slowly(*arguments: Any) -> list[Produced | Ended]:
        nonlocal produced
        time.sleep(STEP_S if produced - len(heard) <= AHEAD else AHEAD_S)
        outcomes = compute(*arguments)
        produced += sum(isinstance(one, Produced) for one in outcomes)
        return outcomes

    monkeypatch.setattr("pdbus.engine.core.compute", slowly)
    async with rig(new_bus, source, name=unique("tiny"), engine=engine, decodes=2) as made:
        heard = made.router.items
        yield made
        await made.until_idle()


def job_of(worker: DecodeWorker, ticket: Ticket) -> DecodeJob | LocalJob:
    job = worker.jobs.get((ticket.session, ticket.attempt))
    assert job
    return job


async def written(two: Rig, ticket: Ticket, tokens: int) -> None:
    await two.router.until(lambda: len(ids(two.router.of(ticket))) >= tokens)


async def go_on(two: Rig, ticket: Ticket, worker: DecodeWorker) -> tuple[Ticket, list[TokenItem]]:
    """What the router does on `moved`: the next attempt, with all that was delivered, at that worker."""
    before = await two.router.rest(ticket)
    assert before[-1].finish == "moved"
    assert before[-1].moved_to == worker.id
    delivered = tuple(ids(before))
    assert before[-1].index == len(ticket.delivered) + len(delivered)
    later = replace(ticket, attempt=ticket.attempt + 1, delivered=ticket.delivered + delivered)
    await two.router.bus.call(DECODE_RUN(worker=worker.id), DecodeRun(later, None), RequestContext.after(30))
    return later, await two.router.rest(later)


@pytest.mark.parametrize("handed_over", [True, False])
async def test_it_goes_on_with_its_pages_and_the_same_text(two: Rig, model: Model, handed_over: bool) -> None:
    router, prompt, other = two.router, prompt_of(70), two.others[0]
    ticket = router.ticket(prompt, LENGTH)
    await (router.start(ticket) if handed_over else router.run_local(ticket))
    await written(two, ticket, 20)
    assert await two.decode.mover.move(job_of(two.decode, ticket))
    later, items = await go_on(two, ticket, other)
    assert [*later.delivered, *ids(items)] == Runner(model).greedy(prompt, LENGTH)
    assert items[-1].finish == "length"
    reached = len(prompt) + len(later.delivered)
    assert items[0].cached_tokens == min((reached - 1) // 16 * 16, len(prompt)), "all but its last page came along"
    assert two.decode.mover.moved == 1


async def test_a_sampled_answer_with_log_probabilities_moves_there_and_back(two: Rig) -> None:
    router, other = two.router, two.others[0]
    late_ns = time.time_ns() + 200 * 10**9  # three answers of that length, on whatever machine
    ticket = router.ticket(prompt_of(40), LENGTH, sampling=SAMPLED, seed=99, deadline_ns=late_ns)
    whole = ids(await router.answer_local(ticket))
    ticket = replace(ticket, request_id=f"{ticket.request_id}-again")
    await router.run_local(ticket)
    await written(two, ticket, 10)
    assert await two.decode.mover.move(job_of(two.decode, ticket), other.id)
    before = await router.rest(ticket)
    later = replace(ticket, attempt=2, delivered=tuple(ids(before)))
    await router.bus.call(DECODE_RUN(worker=other.id), DecodeRun(later, None), RequestContext.after(30))
    await written(two, later, 10)
    assert await other.mover.move(job_of(other, later), two.decode.id)
    last, items = await go_on(two, later, two.decode)
    assert [*last.delivered, *ids(items)] == whole


async def test_many_move_at_once_when_a_worker_is_drained(two: Rig, model: Model) -> None:
    router, other = two.router, two.others[0]
    prompts = [prompt_of(20 + 5 * at, seed=at) for at in range(6)]
    tickets = [router.ticket(prompt, 120) for prompt in prompts]
    for at, ticket in enumerate(tickets):
        await (router.start(ticket) if at % 2 else router.run_local(ticket))
    for ticket in tickets:
        await written(two, ticket, 3)  # two of them by the decode worker itself
    await two.decode.stop_intake()
    async with asyncio.timeout(30):
        await two.decode.drain()
    for prompt, ticket in zip(prompts, tickets, strict=True):
        items = await router.rest(ticket)
        text = ids(items)
        if items[-1].finish == "moved":
            later, rest = await go_on(two, ticket, other)
            text = [*later.delivered, *ids(rest)]
        assert text == Runner(model).greedy(prompt, 120)
    assert two.decode.mover.moved


async def test_the_last_item_is_sent_again_and_the_source_holds_nothing(two: Rig) -> None:
    router, other = two.router, two.others[0]
    ticket = router.ticket(prompt_of(40), LENGTH)
    await router.run_local(ticket)
    await written(two, ticket, 5)
    assert await two.decode.mover.move(job_of(two.decode, ticket))
    await until(lambda: not len(two.decode.jobs))
    await router.rest(ticket)
    wanted = Resend(ticket.request_id, 0, 1, len(ids(router.of(ticket))))
    reply = await router.bus.call(DECODE_RESEND(worker=two.decode.id), wanted, RequestContext.after(30))
    assert reply.state == "finished"
    assert [item.moved_to for item in reply.items if item.finish] == [other.id]
    assert len(other.guests) == 1, "its pages wait there"
    other.guests.expire(1e12)


async def test_where_the_target_refuses_the_answer_stays(two: Rig, model: Model) -> None:
    router, other = two.router, two.others[0]
    prompt = prompt_of(40)
    ticket = router.ticket(prompt, LENGTH)
    await router.run_local(ticket)
    await written(two, ticket, 5)
    await other.stop_intake()
    assert not await two.decode.mover.move(job_of(two.decode, ticket), other.id)
    assert not await two.decode.mover.move(job_of(two.decode, ticket), "nobody")
    assert ids(await router.rest(ticket)) == Runner(model).greedy(prompt, LENGTH)


async def test_an_answer_that_ends_meanwhile_is_whole(two: Rig, model: Model) -> None:
    router, prompt = two.router, prompt_of(40)
    ticket = router.ticket(prompt, 12)
    with paused(two.decode):
        await router.run_local(ticket)
        job = job_of(two.decode, ticket)
        assert not await two.decode.mover.move(job), "it has not begun"
    await written(two, ticket, 1)
    await two.decode.mover.move(job)
    items = await router.rest(ticket)
    text = (
        ids(items)
        if items[-1].finish == "length"
        else [*ids(items), *ids((await go_on(two, ticket, two.others[0]))[1])]
    )
    assert text == Runner(model).greedy(prompt, 12)


async def test_what_may_fill_no_cache_does_not_move(two: Rig) -> None:
    router = two.router
    ticket = router.ticket(prompt_of(40), 100, prompt_logprobs=0)
    await router.run_local(ticket)
    await written(two, ticket, 5)
    assert not await two.decode.mover.move(job_of(two.decode, ticket))
    await router.rest(ticket)


def _adopt(two: Rig, ticket: Ticket, **fields: object) -> Adopt:
    worker = two.decode
    made = Adopt(
        worker.id,
        ticket.request_id,
        ticket.choice,
        ticket.attempt,
        ticket.tenant,
        ticket.root,
        ticket.salt,
        ticket.tokens,
        str(worker.pool.format),
        worker.versions.compute_class,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"source": ""}, InvalidRequest),
        ({"tokens": (1, 2, 3)}, InvalidRequest),
        ({"tokens": ()}, InvalidRequest),
        ({"page_format": "other"}, Conflict),
        ({"compute_class": "other"}, Conflict),
        ({"root": bytes(32)}, PdbusError),
        ({"tokens": (5,) * 16 * 70}, PdbusError),
        ({"tokens": (5,) * 16 * 10**4}, InvalidRequest),
        ({}, NotFound),
    ],
)
async def test_a_move_that_can_not_be_is_refused_and_leaves_nothing(
    two: Rig, fields: dict[str, object], error: type[PdbusError]
) -> None:
    """The last one: nothing moves from there, so that there are no pages to be had."""
    ticket = two.router.ticket(prompt_of(32), 4)
    call = two.router.bus.call(
        DECODE_ADOPT(worker=two.others[0].id), _adopt(two, ticket, **fields), RequestContext.after(30)
    )
    assert isinstance(await refused(call), error)
    assert not len(two.others[0].guests)


async def test_a_late_word_of_an_older_attempt_is_refused(two: Rig) -> None:
    router, other = two.router, two.others[0]
    prompt = prompt_of(64)
    await router.answer_local(router.ticket(prompt, 1))  # so that pages are there to be sent
    ticket = router.ticket(prompt[:48], LENGTH)
    await router.run_local(ticket)
    await written(two, ticket, 2)
    assert await two.decode.mover.move(job_of(two.decode, ticket))
    to = DECODE_ADOPT(worker=other.id)
    message = _adopt(two, replace(ticket, attempt=2))
    assert (await router.bus.call(to, message, RequestContext.after(30))).pages == 0, "they are here already"
    assert isinstance(
        await refused(router.bus.call(to, replace(message, attempt=1), RequestContext.after(30))), StaleAttempt
    )
    later = replace(ticket, attempt=3, delivered=tuple(ids(await router.rest(ticket))))
    router.decode = other.id
    await router.answer_local(later)
    assert not len(other.guests), "who goes on with it has taken the pages over"


async def test_pages_are_sent_only_while_their_answer_moves(two: Rig) -> None:
    wanted = PagesWanted("nobody-0", 1, 0, 4, "address", "stream")
    call = two.router.bus.call(DECODE_PAGES(worker=two.decode.id), wanted, RequestContext.after(30))
    assert isinstance(await refused(call), NotFound)


async def test_another_tenants_pages_are_not_found_by_a_move(two: Rig) -> None:
    """Keys are made from what the answer's own ticket says: the same tokens of another tenant are other pages."""
    router, other = two.router, two.others[0]
    prompt = prompt_of(48)
    router.decode = other.id
    await router.answer_local(router.ticket(prompt, 20, salt=b"theirs"))
    call = router.bus.call(
        DECODE_ADOPT(worker=other.id), _adopt(two, router.ticket(prompt, 4, salt=b"ours")), RequestContext.after(30)
    )
    assert isinstance(await refused(call), NotFound), "they would have to be fetched"
