"""What is refused at once, and what may come twice (LESSONS 2, 6, 8)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from pdbus.context import RequestContext
from pdbus.decode.worker import MOST_JOBS
from pdbus.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PdbusError,
    RootGone,
)
from pdbus.messages.workers import Resend
from pdbus.model.backend import Model
from pdbus.subjects import DECODE_RESEND, PREFILL_RESEND
from tests.support.asking import ids, refused
from tests.support.handover import reserve, reserve_of
from tests.support.llama import Runner
from tests.support.workers import Rig, prompt_of


async def test_a_run_that_decode_refuses_leaves_nothing_at_prefill(workers: Rig) -> None:
    """LESSONS 2: a sound ticket to prefill, a broken one to decode; the router then cancels, as it always does."""
    router, ticket = workers.router, workers.router.ticket(prompt_of(100))
    await router.run_prefill(ticket)
    assert isinstance(await refused(router.run_decode(replace(ticket, max_tokens=0))), InvalidRequest)
    await router.cancel(ticket)
    await router.cancelled_by(ticket, {router.prefill, router.decode})
    await workers.until_idle()


async def test_reservations(workers: Rig) -> None:
    ticket = workers.router.ticket(prompt_of(20))
    message = reserve_of(workers, ticket)
    assert await reserve(workers, message) == await reserve(workers, message)
    assert workers.decode.load().leases == 1
    for wrong, error in (
        ({"tokens": 21}, Conflict),
        ({"page_format": "kv1-other"}, Conflict),
        ({"attempt": 0}, InvalidRequest),
        ({"request_id": "other", "tokens": 0}, InvalidRequest),
        ({"request_id": "other", "tokens": 512}, InvalidRequest),
        ({"request_id": "other", "root": bytes(32)}, RootGone),
        ({"request_id": "other", "root": b"short"}, InvalidRequest),
        ({"request_id": "other", "deadline_ns": time.time_ns() - 1}, DeadlineExceeded),
        ({"request_id": ""}, InvalidRequest),
        ({"router": ""}, InvalidRequest),
    ):
        assert type(await refused(reserve(workers, replace(message, **wrong)))) is error, wrong  # type: ignore[arg-type]
    assert workers.decode.load().leases == 1
    await workers.router.cancel(ticket)
    await workers.until_idle()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"prompt": ()}, InvalidRequest),
        ({"prompt": (5, 320)}, InvalidRequest),
        ({"prompt": (5, -1)}, InvalidRequest),
        ({"prompt": (5,) * 512}, InvalidRequest),
        ({"model": "another"}, InvalidRequest),
        ({"root": bytes(32)}, RootGone),
        ({"deadline_ns": 0}, DeadlineExceeded),
        ({"max_tokens": 0}, InvalidRequest),
        ({"attempt": 0}, InvalidRequest),
        ({"router": ""}, InvalidRequest),
    ],
    ids=str,
)
async def test_a_ticket_that_can_not_be_served_is_refused_at_once(
    workers: Rig, wrong: dict[str, object], error: type[PdbusError]
) -> None:
    """LESSONS 2 and 6: and whatever the other leg got of it is freed."""
    ticket = replace(workers.router.ticket(prompt_of(20)), **wrong)  # type: ignore[arg-type]
    assert isinstance(await refused(workers.router.run_prefill(ticket)), error)
    assert isinstance(await refused(workers.router.run_decode(ticket)), error)
    await workers.until_idle()


async def test_one_id_sent_many_times_at_once_is_one_request(workers: Rig, model: Model) -> None:
    """LESSONS 8."""
    ticket = workers.router.ticket(prompt_of(50))
    await asyncio.gather(*(workers.router.start(ticket) for _ in range(8)))
    assert ids(await workers.router.rest(ticket)) == Runner(model).greedy(list(ticket.prompt), 8)
    await workers.router.start(ticket)
    await workers.until_idle()
    own = [item for item in workers.router.items if item.request_id == ticket.request_id]
    assert [item.index for item in sorted(own, key=lambda item: item.index)] == list(range(8))


async def test_pages_for_an_interrupted_answer_are_reserved_beyond_the_places_of_others(workers: Rig) -> None:
    workers.decode.jobs._most = 1
    first, other = (workers.router.ticket(prompt_of(20, seed)) for seed in (1, 2))
    await reserve(workers, reserve_of(workers, first))
    assert isinstance(await refused(reserve(workers, reserve_of(workers, other))), Overloaded)
    await reserve(workers, reserve_of(workers, other, interrupted=True))
    for ticket in (first, other):
        await workers.router.cancel(ticket)
    await workers.until_idle()


async def test_resends(workers: Rig) -> None:
    router = workers.router
    ticket = router.ticket(prompt_of(20), 6)
    items = await router.answer(ticket)
    for to, own in (
        (PREFILL_RESEND(worker=router.prefill), items[:1]),
        (DECODE_RESEND(worker=router.decode), items[1:]),
    ):
        reply = await router.bus.call(to, Resend(ticket.request_id, 0, 1, 0), RequestContext.after(30))
        assert list(reply.items) == own
        last = await router.bus.call(to, Resend(ticket.request_id, 0, 1, 5), RequestContext.after(30))
        assert list(last.items) == own[4:]
        other = await router.bus.call(to, Resend(ticket.request_id, 0, 2, 0), RequestContext.after(30))
        assert (other.state, other.items) == ("unknown", ())


async def test_as_many_as_it_has_places_for_may_come_at_once(workers: Rig) -> None:
    """As they do where another worker is lost."""
    router = workers.router
    tickets = [router.ticket(prompt_of(20)) for _ in range(MOST_JOBS)]
    await asyncio.gather(*map(router.run_decode, tickets))
    assert len(workers.decode.jobs) == MOST_JOBS
    await asyncio.gather(*map(router.cancel, tickets))
    await workers.until_idle()


async def test_routers_may_ask_for_all_answers_at_once(workers: Rig) -> None:
    """As they do where a frame is lost that had something of each."""
    to = DECODE_RESEND(worker=workers.router.decode)
    asked = (Resend(f"r{number}", 0, 1, 0) for number in range(2 * MOST_JOBS))
    replies = await asyncio.gather(*(workers.router.bus.call(to, one, RequestContext.after(60)) for one in asked))
    assert {reply.state for reply in replies} == {"unknown"}


async def test_a_resend_before_the_first_token_says_that_it_is_at_work(workers: Rig) -> None:
    ticket = workers.router.ticket(prompt_of(20))
    await workers.router.run_decode(ticket)
    to = DECODE_RESEND(worker=workers.router.decode)
    reply = await workers.router.bus.call(to, Resend(ticket.request_id, 0, 1, 0), RequestContext.after(30))
    assert reply.state == "running"
    await workers.router.cancel(ticket)
