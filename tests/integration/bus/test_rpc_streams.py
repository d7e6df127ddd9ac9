"""Streams of replies: the same on the twin and on a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from pdbus.bus import serving, streams
from pdbus.bus.codec import encode
from pdbus.bus.transport import Raw
from pdbus.context import Deadline, RequestContext
from pdbus.errors import (
    Corrupt,
    Overloaded,
    StaleAttempt,
    Unavailable,
)
from pdbus.messages.router import InferReply, InferRequest
from pdbus.subjects import INFER
from tests.support.nats import BusPair, twin_pair
from tests.support.signs_of_life import two_replies
from tests.support.simulated_time import simulated

Unique = Callable[[str], str]


ASK_STREAM = InferRequest("completions", {})


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's server may stand still for longer than a caller waits for the first sign of life."""
    monkeypatch.setattr(streams, "BEGIN_S", 30.0)
    monkeypatch.setattr(streams, "LONGEST_SILENCE_S", 30.0)


def soon(seconds: float = 30.0) -> RequestContext:
    return RequestContext.after(seconds)


async def test_a_queue_group_shares_its_requests(bus_pair: BusPair, unique: Unique) -> None:
    to = INFER(model=unique("m"))
    answered = {"server": 0, "client": 0}

    def make(name: str) -> Callable[[InferRequest, RequestContext], AsyncIterator[InferReply]]:
        async def handler(message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
            answered[name] += 1
            yield InferReply({})

        return handler

    await bus_pair.server.serve(to, make("server"))
    await bus_pair.client.serve(to, make("client"))
    for _ in range(60):
        async with bus_pair.client.stream(to, ASK_STREAM, soon()) as replies:
            assert [reply async for reply in replies] == [InferReply({})]
    assert sum(answered.values()) == 60
    assert min(answered.values()) > 5


async def count_to(limit: int, message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
    for number in range(limit):
        yield InferReply({"number": number})


async def test_a_stream_comes_whole_and_in_order(bus_pair: BusPair, unique: Unique) -> None:
    to = INFER(model=unique("m"))
    await bus_pair.server.serve(to, lambda message, ctx: count_to(500, message, ctx))
    async with bus_pair.client.stream(to, ASK_STREAM, soon()) as replies:
        assert [reply.data["number"] async for reply in replies] == list(range(500))
        with pytest.raises(StopAsyncIteration):
            await anext(replies)


async def test_an_error_ends_a_stream_after_what_came_before(bus_pair: BusPair, unique: Unique) -> None:
    async def handler(message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        yield InferReply({})
        raise StaleAttempt("a newer one")

    to = INFER(model=unique("m"))
    await bus_pair.server.serve(to, handler)
    async with bus_pair.client.stream(to, ASK_STREAM, soon()) as replies:
        assert await anext(replies) == InferReply({})
        with pytest.raises(StaleAttempt, match="a newer one"):
            await anext(replies)


async def test_a_caller_that_leaves_closes_the_generator(bus_pair: BusPair, unique: Unique) -> None:
    closed = asyncio.Event()

    async def handler(message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        try:
            yield InferReply({})
            await asyncio.sleep(600)
        finally:
            closed.set()

    to = INFER(model=unique("m"))
    registration = await bus_pair.server.serve(to, handler)
    async with bus_pair.client.stream(to, ASK_STREAM, soon(60)) as replies:
        await anext(replies)
    async with asyncio.timeout(30):
        await closed.wait()
    await registration.drain(Deadline.after(30))
    assert registration.running == 0


async def test_a_caller_whose_process_died_closes_the_generator(
    bus_pair: BusPair, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "KEEPALIVE_S", 0.05)
    closed = asyncio.Event()

    async def handler(message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        try:
            await asyncio.sleep(600)
            yield InferReply({})
        finally:
            closed.set()

    to = INFER(model=unique("m"))
    await bus_pair.server.serve(to, handler)
    # An inbox to which nobody subscribes is all that a dead process leaves.
    bus_pair.client.transport.send(to.name, encode(ASK_STREAM), reply="_INBOX.dead.1")
    async with asyncio.timeout(30):
        await closed.wait()


async def _one_frame(bus_pair: BusPair, name: str, stop: str) -> None:
    """All that who is asked there ever sends; it would hear at `stop` that nobody reads."""
    server = bus_pair.server.transport
    await server.subscribe(
        name, lambda raw: server.send(raw.reply, encode(InferReply({})), reply=stop, headers={"pd-seq": "0"})
    )


async def test_a_silent_sender_is_given_up(bus_pair: BusPair, unique: Unique, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its subject is there, and nothing comes."""
    monkeypatch.setattr(streams, "LONGEST_SILENCE_S", 0.1)
    to = INFER(model=unique("m"))
    await bus_pair.server.transport.subscribe("_INBOX.hangs.1", lambda raw: None)
    await _one_frame(bus_pair, to.name, stop="_INBOX.hangs.1")
    async with bus_pair.client.stream(to, ASK_STREAM, soon(60)) as replies:
        assert await anext(replies) == InferReply({})
        with pytest.raises(Unavailable, match="silent"):
            await anext(replies)


async def test_one_that_never_says_anything_is_given_up_sooner(
    bus_pair: BusPair, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not even taken the request."""
    monkeypatch.setattr(streams, "BEGIN_S", 0.1)
    monkeypatch.setattr(streams, "LONGEST_SILENCE_S", 600.0)
    to = INFER(model=unique("m"))
    await bus_pair.server.transport.subscribe(to.name, lambda raw: None)
    async with asyncio.timeout(30):
        with pytest.raises(Unavailable, match="silent"):
            async with bus_pair.client.stream(to, ASK_STREAM, soon(600)) as replies:
                await anext(replies)


async def _late(message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
    await asyncio.sleep(4 * streams.LONGEST_SILENCE_S)
    yield InferReply({})


def test_a_slow_handler_that_is_alive_is_waited_for() -> None:
    """In simulated seconds."""

    async def asked() -> list[InferReply]:
        async with twin_pair() as pair:
            await pair.server.serve(INFER(model="m"), _late)
            async with pair.client.stream(INFER(model="m"), ASK_STREAM, soon(300)) as replies:
                return [reply async for reply in replies]

    assert simulated(asked) == [InferReply({})]


async def test_its_signs_of_life_are_no_replies(
    bus_pair: BusPair, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "KEEPALIVE_S", 0.02)

    async def handler(message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        await asyncio.sleep(0.2)
        yield InferReply({})

    to = INFER(model=unique("m"))
    await bus_pair.server.serve(to, handler)
    async with bus_pair.client.stream(to, ASK_STREAM, soon(60)) as replies:
        assert [reply async for reply in replies] == [InferReply({})]


async def test_a_sender_that_died_is_not_waited_for(
    bus_pair: BusPair, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before its silence would be enough."""
    monkeypatch.setattr(streams, "LONGEST_SILENCE_S", 600.0)
    monkeypatch.setattr(streams, "QUIET_S", 0.01)
    to = INFER(model=unique("m"))
    # Frames with a reply subject to which nobody subscribes are all that a dead process leaves.
    await _one_frame(bus_pair, to.name, stop="_INBOX.dead.1")
    async with asyncio.timeout(30), bus_pair.client.stream(to, ASK_STREAM, soon(600)) as replies:
        assert await anext(replies) == InferReply({})
        with pytest.raises(Unavailable, match="nobody serves"):
            await anext(replies)


async def test_who_is_asked_for_a_sign_of_life_gives_it(
    bus_pair: BusPair, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it would give none by itself; and its stream goes on."""
    to = INFER(model=unique("m"))
    await bus_pair.server.serve(to, two_replies(monkeypatch))
    async with asyncio.timeout(30), bus_pair.client.stream(to, ASK_STREAM, soon(600)) as replies:
        assert [reply.data["n"] async for reply in replies] == [0, 1]


async def test_a_caller_that_was_held_up_takes_nobody_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LONGEST_SILENCE_S", 0.1)
    reading = asyncio.Event()

    async def handler(message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        await reading.wait()
        time.sleep(0.5)  # noqa: ASYNC251 - the process that both are in
        yield InferReply({})

    async with twin_pair() as pair:
        await pair.server.serve(INFER(model="m"), handler)
        async with pair.client.stream(INFER(model="m"), ASK_STREAM, soon(60)) as replies:
            reading.set()
            assert [reply async for reply in replies] == [InferReply({})]


async def test_a_missing_frame_is_noticed(bus_pair: BusPair, unique: Unique) -> None:
    to = INFER(model=unique("m"))
    server = bus_pair.server.transport

    def answer(raw: Raw) -> None:
        for sequence in (0, 2):
            server.send(raw.reply, b"\x81\xa4data\x80", headers={"pd-seq": str(sequence)})

    await server.subscribe(to.name, answer)
    async with bus_pair.client.stream(to, ASK_STREAM, soon()) as replies:
        assert await anext(replies) == InferReply({})
        with pytest.raises(Corrupt):
            await anext(replies)


async def test_a_reader_far_behind_loses_its_stream_only(
    bus_pair: BusPair, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "QUEUE_FRAMES", 10)
    to = INFER(model=unique("m"))
    registration = await bus_pair.server.serve(to, lambda message, ctx: count_to(1000, message, ctx))
    async with bus_pair.client.stream(to, ASK_STREAM, soon()) as replies:
        await bus_pair.client.transport.barrier()  # the request is at the broker
        await bus_pair.server.transport.barrier()  # and here
        await registration.drain(Deadline.after(30))
        await bus_pair.server.transport.barrier()  # all frames are at the broker
        await bus_pair.client.transport.barrier()  # and here
        with pytest.raises(Overloaded):
            async for _ in replies:
                pass
