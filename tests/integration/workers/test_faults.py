"""Peers that die, frames that lie, and memory that runs out: each ends its own attempt, frees it, and disturbs no other."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from pdbus.bus.codec import encode
from pdbus.context import Deadline, RequestContext
from pdbus.decode.leases import LEASE_S
from pdbus.errors import (
    Cancelled,
    Conflict,
    Corrupt,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PdbusError,
    RootGone,
    StaleAttempt,
    Unavailable,
)
from pdbus.kv.codec import export_layer
from pdbus.messages.bulk import KV_FINAL, KvHead
from pdbus.messages.common import Ticket
from pdbus.messages.decode import KvFinal, Lease, Reserve
from pdbus.messages.router import TokenItem
from pdbus.messages.workers import Resend
from pdbus.model.llama import Llama
from pdbus.subjects import DECODE_RESEND, DECODE_RESERVE, KV, PREFILL_RESEND
from tests.integration.workers.test_answers import prompt_of
from tests.integration.workers.test_cancel import paused, until
from tests.support.llama import Runner
from tests.support.workers import LocalSource, NewBus, Rig, ids, refused, rig, silence


def reserve_of(workers: Rig, ticket: Ticket, **changed: object) -> Reserve:
    reserve = Reserve(
        ticket.request_id,
        ticket.choice,
        ticket.attempt,
        ticket.router,
        ticket.root,
        len(ticket.tokens),
        workers.router.prefill,
        str(workers.decode.pool.format),
        "any",
        ticket.deadline_ns,
    )
    return replace(reserve, **changed)  # type: ignore[arg-type]


async def reserve(workers: Rig, message: Reserve) -> Lease:
    to = DECODE_RESERVE(worker=workers.router.decode)
    return await workers.router.bus.call(to, message, RequestContext.after(5))


class Hand:
    """A prefill worker's hand-over, made by hand: every part of it can be wrong."""

    def __init__(self, workers: Rig, ticket: Ticket, model: Llama) -> None:
        self.workers, self.ticket = workers, ticket
        runner = Runner(model)
        logits = runner.logits(list(ticket.tokens))[-1]
        pages = runner.page_ids[: workers.decode.pool.format.pages_for(len(ticket.tokens))]
        self.bodies = [bytes(export_layer(runner.pool, layer, pages)) for layer in range(model.config.layers)]
        tokens = len(ticket.tokens)
        self.heads = [KvHead(ticket.attempt, ticket.root, at, 0, tokens) for at in range(model.config.layers)]
        first = TokenItem(
            ticket.request_id,
            ticket.choice,
            ticket.attempt,
            ticket.root,
            len(ticket.delivered),
            (int(logits.argmax()),),
        )
        checksum = 0
        for body in self.bodies:
            checksum = zlib.crc32(body, checksum)
        self.final = KvFinal(ticket.attempt, ticket.root, tokens, len(self.bodies), checksum, first)

    @property
    def subject(self) -> str:
        worker, ticket = self.workers.router.decode, self.ticket
        return KV.name(worker=worker, session=ticket.session, attempt=str(ticket.attempt))

    async def send(self) -> None:
        async with self.workers.router.bus.bulk.send(self.subject, Deadline.after(5)) as out:
            for head, body in zip(self.heads, self.bodies, strict=True):
                await out.item(head, body)
            head = KvHead(self.final.attempt, self.final.root, KV_FINAL, self.final.tokens, 0)
            await out.item(head, encode(self.final))


async def test_a_hand_over_by_hand_is_taken_if_it_is_sound(workers: Rig, model: Llama) -> None:
    ticket = workers.router.ticket(prompt_of(20))
    hand = Hand(workers, ticket, model)
    lease = await reserve(workers, reserve_of(workers, ticket))
    assert lease.lease_ms == LEASE_S * 1e3
    await workers.router.run_decode(ticket)
    await hand.send()
    items = await workers.router.rest(ticket, first=1)
    assert ids(items) == Runner(model).greedy(list(ticket.prompt), 8)[1:]


def wrong_root(hand: Hand) -> None:
    hand.heads[1] = replace(hand.heads[1], root=bytes(32))


def wrong_attempt(hand: Hand) -> None:
    hand.heads[0] = replace(hand.heads[0], attempt=9)


def a_layer_twice(hand: Hand) -> None:
    hand.heads[1] = hand.heads[0]


def a_layer_missing(hand: Hand) -> None:
    del hand.heads[1], hand.bodies[1]
    hand.final = replace(hand.final, frames=1, checksum=zlib.crc32(hand.bodies[0]))


def a_layer_too_many(hand: Hand) -> None:
    hand.heads.append(replace(hand.heads[0], layer=2))
    hand.bodies.append(hand.bodies[0])


def a_short_body(hand: Hand) -> None:
    hand.bodies[0] = hand.bodies[0][:-4]


def more_tokens_than_announced(hand: Hand) -> None:
    hand.heads[0] = replace(hand.heads[0], tokens=64)
    hand.bodies[0] = hand.bodies[0] * 2


def another_start(hand: Hand) -> None:
    hand.heads[0] = replace(hand.heads[0], start=16, tokens=4)


def wrong_checksum(hand: Hand) -> None:
    hand.final = replace(hand.final, checksum=hand.final.checksum ^ 1)


def another_requests_first_token(hand: Hand) -> None:
    hand.final = replace(hand.final, first=replace(hand.final.first, request_id="another"))


def final_of_another_root(hand: Hand) -> None:
    hand.final = replace(hand.final, root=bytes(32))


def no_final(hand: Hand) -> None:
    async def send() -> None:
        async with hand.workers.router.bus.bulk.send(hand.subject, Deadline.after(5)) as out:
            await out.item(hand.heads[0], hand.bodies[0])

    hand.send = send  # type: ignore[method-assign]


LIES = [
    wrong_root,
    wrong_attempt,
    a_layer_twice,
    a_layer_missing,
    a_layer_too_many,
    a_short_body,
    more_tokens_than_announced,
    another_start,
    wrong_checksum,
    another_requests_first_token,
    final_of_another_root,
    no_final,
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_a_hand_over_that_lies_fails_its_attempt_and_nothing_else(
    workers: Rig, model: Llama, lie: Callable[[Hand], None]
) -> None:
    """LESSONS 4 to 6: fail closed; never text from a wrong or incomplete KV."""
    ticket = workers.router.ticket(prompt_of(20))
    hand = Hand(workers, ticket, model)
    lie(hand)
    await reserve(workers, reserve_of(workers, ticket))
    await workers.router.run_decode(ticket)
    sent, answer = await asyncio.gather(refused_or_none(hand.send()), refused(workers.router.rest(ticket)))
    assert isinstance(answer, Corrupt)
    assert sent is None or isinstance(sent, Corrupt | Cancelled)
    await workers.until_idle()
    good = workers.router.ticket(list(ticket.prompt))
    assert ids(await workers.router.answer(good)) == Runner(model).greedy(list(ticket.prompt), 8)


async def refused_or_none(work: object) -> PdbusError | None:
    try:
        await work  # type: ignore[misc]
    except PdbusError as error:
        return error
    return None


async def test_frames_for_no_lease_are_refused(workers: Rig, model: Llama) -> None:
    """A replay after the end, a stale attempt, a session that never was (LESSONS 3 to 5)."""
    ticket = workers.router.ticket(prompt_of(20), 3)
    assert isinstance(await refused(Hand(workers, ticket, model).send()), NotFound)
    await workers.router.answer(ticket)
    stale = Hand(workers, replace(ticket, attempt=3), model)
    assert isinstance(await refused(stale.send()), NotFound)
    assert isinstance(await refused(reserve(workers, reserve_of(workers, ticket))), StaleAttempt)


async def test_a_second_sender_can_not_write_into_a_lease(workers: Rig, model: Llama) -> None:
    ticket = workers.router.ticket(prompt_of(20))
    hand, forged = Hand(workers, ticket, model), Hand(workers, ticket, model)
    forged.bodies = [bytes(len(body)) for body in forged.bodies]
    await reserve(workers, reserve_of(workers, ticket))
    async with workers.router.bus.bulk.send(hand.subject, Deadline.after(5)) as out:
        await out.item(hand.heads[0], hand.bodies[0])
        assert isinstance(await refused(forged.send()), Conflict)
        await out.item(hand.heads[1], hand.bodies[1])
        await out.item(KvHead(1, ticket.root, KV_FINAL, 20, 0), encode(hand.final))
    await workers.router.run_decode(ticket)
    assert ids(await workers.router.rest(ticket, first=1)) == Runner(model).greedy(list(ticket.prompt), 8)[1:]


async def test_a_run_that_differs_from_the_reservation_is_refused(workers: Rig, model: Llama) -> None:
    ticket = workers.router.ticket(prompt_of(20))
    await reserve(workers, reserve_of(workers, ticket))
    await Hand(workers, ticket, model).send()
    longer = replace(ticket, prompt=(*ticket.prompt, 5))
    await workers.router.run_decode(longer)
    assert isinstance(await refused(workers.router.rest(longer)), Conflict)


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


async def test_one_id_sent_many_times_at_once_is_one_request(workers: Rig, model: Llama) -> None:
    """LESSONS 8."""
    ticket = workers.router.ticket(prompt_of(50))
    await asyncio.gather(*(workers.router.start(ticket) for _ in range(8)))
    assert ids(await workers.router.rest(ticket)) == Runner(model).greedy(list(ticket.prompt), 8)
    await workers.router.start(ticket)
    await workers.until_idle()
    own = [item for item in workers.router.items if item.request_id == ticket.request_id]
    assert [item.index for item in sorted(own, key=lambda item: item.index)] == list(range(8))


async def test_resends(workers: Rig) -> None:
    router = workers.router
    ticket = router.ticket(prompt_of(20), 6)
    items = await router.answer(ticket)
    for to, own in (
        (PREFILL_RESEND(worker=router.prefill), items[:1]),
        (DECODE_RESEND(worker=router.decode), items[1:]),
    ):
        reply = await router.bus.call(to, Resend(ticket.request_id, 0, 1, 0), RequestContext.after(5))
        assert list(reply.items) == own
        last = await router.bus.call(to, Resend(ticket.request_id, 0, 1, 5), RequestContext.after(5))
        assert list(last.items) == own[4:]
        other = await router.bus.call(to, Resend(ticket.request_id, 0, 2, 0), RequestContext.after(5))
        assert (other.state, other.items) == ("unknown", ())


async def test_a_resend_before_the_first_token_says_that_it_is_at_work(workers: Rig) -> None:
    ticket = workers.router.ticket(prompt_of(20))
    await workers.router.run_decode(ticket)
    to = DECODE_RESEND(worker=workers.router.decode)
    reply = await workers.router.bus.call(to, Resend(ticket.request_id, 0, 1, 0), RequestContext.after(5))
    assert reply.state == "running"
    await workers.router.cancel(ticket)


async def test_the_deadline_ends_an_answer_in_its_middle(workers: Rig) -> None:
    ticket = workers.router.ticket(prompt_of(20), 490, deadline_ns=time.time_ns() + 300_000_000)
    assert isinstance(await refused(workers.router.answer(ticket)), DeadlineExceeded)
    await workers.until_idle()


async def test_a_prefill_worker_that_dies_frees_its_lease(workers: Rig) -> None:
    """LESSONS 1 and 7: known within the time that presence takes, told as retryable."""
    ticket = workers.router.ticket(prompt_of(400))
    await workers.router.start(ticket)
    await until(lambda: any(job.lease and job.lease.frames for job in workers.decode.jobs.values()))
    with paused(workers.prefill):
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
    await router.run_decode(router.ticket(prompt_of(20), router="never-there"))
    await router.answer(other)
    await until(lambda: workers.decode.jobs)
    await workers.until_idle(4.0)


async def test_pages_that_run_out_cost_the_youngest_answer(
    new_bus: NewBus, source: LocalSource, model: Llama, unique: Callable[[str], str]
) -> None:
    """It is told as overloaded, so that the router goes on with it elsewhere; the older one is not disturbed."""
    async with rig(new_bus, source, name=unique("tiny"), decode_pages=12) as workers:
        router = workers.router
        old, young = router.ticket(prompt_of(64), 100), router.ticket(prompt_of(48, 1), 100)
        await router.start(old)
        await router.until(lambda: len(router.of(old)) > 1)
        error = await refused(router.answer(young))
        assert isinstance(error, Overloaded)
        assert ids(await router.rest(old)) == Runner(model).greedy(list(old.prompt), 100)
        await workers.until_idle()


async def test_a_full_decode_worker_is_waited_for(
    new_bus: NewBus, source: LocalSource, model: Llama, unique: Callable[[str], str]
) -> None:
    """While it is full, prefill asks again; requests behind are not blocked by it."""
    async with rig(new_bus, source, name=unique("tiny"), decode_pages=10) as workers:
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
        workers.prefill._most_jobs = 2
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
        await workers.router.start(ticket)
        await until(lambda: any(job.lease and job.lease.frames for job in workers.decode.jobs.values()))
        await workers.kill_prefill()
        assert isinstance(await refused(workers.router.rest(ticket)), Unavailable)
        await until(lambda: not workers.decode.jobs)
        assert isinstance(await refused(workers.router.run_prefill(ticket)), Unavailable)
