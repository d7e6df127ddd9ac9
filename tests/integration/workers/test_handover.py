"""What a decode worker takes of a hand-over, and what it refuses (LESSONS 3 to 6; G1)."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from pdbus.bus.codec import encode
from pdbus.context import Deadline
from pdbus.decode.leases import LEASE_S
from pdbus.errors import (
    Cancelled,
    Conflict,
    Corrupt,
    NotFound,
    Overloaded,
    PdbusError,
    StaleAttempt,
    Unavailable,
)
from pdbus.messages.bulk import KV_FINAL, KvHead
from pdbus.model.backend import Model
from tests.support.asking import ids, refused
from tests.support.handover import Hand, reserve, reserve_of
from tests.support.llama import Runner
from tests.support.workers import LocalSource, NewBus, Rig, prompt_of, rig


async def test_a_hand_over_by_hand_is_taken_if_it_is_sound(workers: Rig, model: Model) -> None:
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


def a_first_token_outside_the_vocabulary(hand: Hand) -> None:
    hand.final = replace(hand.final, first=replace(hand.final.first, ids=(1 << 20,)))


def a_first_token_below_it(hand: Hand) -> None:
    hand.final = replace(hand.final, first=replace(hand.final.first, ids=(-1,)))


def more_cached_than_there_are(hand: Hand) -> None:
    hand.final = replace(hand.final, first=replace(hand.final.first, cached_tokens=1 << 62))


def final_of_another_root(hand: Hand) -> None:
    hand.final = replace(hand.final, root=bytes(32))


def no_final(hand: Hand) -> None:
    async def send() -> None:
        async with hand.workers.router.bus.bulk.send(hand.subject, Deadline.after(30)) as out:
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
    a_first_token_outside_the_vocabulary,
    a_first_token_below_it,
    more_cached_than_there_are,
    final_of_another_root,
    no_final,
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_a_hand_over_that_lies_fails_its_attempt_and_nothing_else(
    workers: Rig, model: Model, lie: Callable[[Hand], None]
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


async def test_frames_for_no_lease_are_refused(workers: Rig, model: Model) -> None:
    """A replay after the end, a stale attempt, a session that never was (LESSONS 3 to 5)."""
    ticket = workers.router.ticket(prompt_of(20), 3)
    assert isinstance(await refused(Hand(workers, ticket, model).send()), NotFound)
    await workers.router.answer(ticket)
    stale = Hand(workers, replace(ticket, attempt=3), model)
    assert isinstance(await refused(stale.send()), NotFound)
    assert isinstance(await refused(reserve(workers, reserve_of(workers, ticket))), StaleAttempt)


async def test_a_second_sender_can_not_write_into_a_lease(workers: Rig, model: Model) -> None:
    ticket = workers.router.ticket(prompt_of(20))
    hand, forged = Hand(workers, ticket, model), Hand(workers, ticket, model)
    forged.bodies = [bytes(len(body)) for body in forged.bodies]
    await reserve(workers, reserve_of(workers, ticket))
    async with workers.router.bus.bulk.send(hand.subject, Deadline.after(30)) as out:
        await out.item(hand.heads[0], hand.bodies[0])
        assert isinstance(await refused(forged.send()), Conflict)
        await out.item(hand.heads[1], hand.bodies[1])
        await out.item(KvHead(1, ticket.root, KV_FINAL, 20, 0), encode(hand.final))
    await workers.router.run_decode(ticket)
    assert ids(await workers.router.rest(ticket, first=1)) == Runner(model).greedy(list(ticket.prompt), 8)[1:]


async def test_a_run_that_differs_from_the_reservation_is_refused(workers: Rig, model: Model) -> None:
    ticket = workers.router.ticket(prompt_of(20))
    await reserve(workers, reserve_of(workers, ticket))
    await Hand(workers, ticket, model).send()
    longer = replace(ticket, prompt=(*ticket.prompt, 5))
    await workers.router.run_decode(longer)
    assert isinstance(await refused(workers.router.rest(longer)), Conflict)


async def test_a_lease_without_progress_ends(workers: Rig) -> None:
    """LESSONS 1: whatever became of its prefill worker."""
    ticket = workers.router.ticket(prompt_of(20))
    await reserve(workers, reserve_of(workers, ticket))
    await workers.router.run_decode(ticket)
    (lease,) = workers.decode.leases._leases.values()
    workers.decode.tick(lease.renewed_s + LEASE_S - 0.001)
    assert workers.decode.load().leases == 1
    workers.decode.tick(lease.renewed_s + LEASE_S)
    assert isinstance(await refused(workers.router.rest(ticket)), Unavailable)
    await workers.until_idle()
    assert isinstance(await refused(reserve(workers, reserve_of(workers, ticket))), Unavailable)


async def test_a_pool_full_of_dead_leases_frees_itself(
    new_bus: NewBus, source: LocalSource, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LESSONS 11: what reaps does not wait for something to be admitted, and a full pool is no end."""
    async with rig(new_bus, source, name=unique("tiny"), decode_pages=20) as workers:
        with pytest.raises(Overloaded):  # noqa: PT012 - one of them
            for seed in range(20):
                ticket = workers.router.ticket(prompt_of(100, seed))
                await reserve(workers, reserve_of(workers, ticket))
        assert workers.decode.held()["leases"] > 1
        monkeypatch.setattr("pdbus.decode.leases.LEASE_S", 0.2)
        await workers.until_idle()
        assert not any(workers.decode.held()[name] for name in ("leases", "pages", "jobs", "sequences"))
        await workers.router.answer(workers.router.ticket(prompt_of(100)))
