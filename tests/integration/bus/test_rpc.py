"""Calls and streams: the same on the twin and on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from pdbus.bus import serving, streams
from pdbus.bus.codec import encode
from pdbus.bus.headers import CALLER_GONE
from pdbus.bus.transport import Raw
from pdbus.context import Deadline, RequestContext
from pdbus.errors import (
    Corrupt,
    DeadlineExceeded,
    Overloaded,
    PdbusError,
    RootGone,
    StaleAttempt,
    TooLarge,
    Unavailable,
)
from pdbus.messages.router import InferReply, InferRequest
from pdbus.messages.workers import Resend, ResendReply
from pdbus.subjects import DECODE_RESEND, INFER, To
from tests.support.nats import BusPair

Unique = Callable[[str], str]
ASK = Resend("r", 0, 1, 0)
ASK_STREAM = InferRequest("completions", {})


def soon(seconds: float = 30.0) -> RequestContext:
    return RequestContext.after(seconds)


async def test_a_call_brings_the_reply_and_the_context(bus_pair: BusPair, unique: Unique) -> None:
    seen: list[RequestContext] = []

    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        seen.append(ctx)
        assert message == Resend("r", 2, 3, 4)
        return ResendReply("running")

    to = DECODE_RESEND(worker=unique("d.ö *"))
    await bus_pair.server.serve(to, handler)
    ctx = RequestContext(Deadline.after(30), request_id="id-1", tenant="Ä b\r\nc")
    assert await bus_pair.client.call(to, Resend("r", 2, 3, 4), ctx) == ResendReply("running")
    assert (seen[0].request_id, seen[0].tenant) == ("id-1", "Ä b\r\nc")
    assert 0 < seen[0].deadline.remaining_s <= ctx.deadline.remaining_s + 0.01


@pytest.mark.parametrize("error", [StaleAttempt("old"), RootGone("r"), Overloaded("full", retry_after_s=2.5)])
async def test_an_error_crosses_as_its_class(bus_pair: BusPair, unique: Unique, error: PdbusError) -> None:
    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        raise error

    to = DECODE_RESEND(worker=unique("d"))
    await bus_pair.server.serve(to, handler)
    with pytest.raises(type(error)) as caught:
        await bus_pair.client.call(to, ASK, soon())
    assert (caught.value.message, caught.value.retry_after_s) == (error.message, error.retry_after_s)


async def test_a_bug_in_a_handler_is_told_without_its_text(bus_pair: BusPair, unique: Unique) -> None:
    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        raise KeyError("a secret")

    to = DECODE_RESEND(worker=unique("d"))
    await bus_pair.server.serve(to, handler)
    with pytest.raises(PdbusError) as caught:
        await bus_pair.client.call(to, ASK, soon())
    assert caught.value.code == "internal"
    assert "secret" not in caught.value.message


async def test_nobody_there_is_known_at_once(bus_pair: BusPair, unique: Unique) -> None:
    started = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable):
        await bus_pair.client.call(DECODE_RESEND(worker=unique("d")), ASK, soon(300))
    with pytest.raises(Unavailable):
        async with bus_pair.client.stream(INFER(model=unique("m")), ASK_STREAM, soon(300)) as replies:
            await anext(replies)
    assert asyncio.get_running_loop().time() - started < 30


async def test_a_deadline_ends_both_sides(bus_pair: BusPair, unique: Unique) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()
        return ResendReply("running")

    to = DECODE_RESEND(worker=unique("d"))
    await bus_pair.server.serve(to, handler)
    async with asyncio.timeout(30):
        while not begun.is_set():  # a busy machine may take all of the deadline to bring it there
            with pytest.raises(DeadlineExceeded):
                await bus_pair.client.call(to, ASK, soon(0.2))
        await ended.wait()


async def test_an_expired_request_never_reaches_the_handler(bus_pair: BusPair, unique: Unique) -> None:
    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        pytest.fail("the handler was called")

    to = DECODE_RESEND(worker=unique("d"))
    await bus_pair.server.serve(to, handler)
    with pytest.raises(DeadlineExceeded):
        await bus_pair.client.call(to, ASK, soon(-1))
    # The same from a caller that did not look at its clock.
    reply = await raw_request(bus_pair, to.name, encode(ASK), {"pd-deadline": "1"})
    assert b"deadline_exceeded" in reply.data


async def test_requests_run_side_by_side_and_above_the_limit_are_refused(bus_pair: BusPair, unique: Unique) -> None:
    release = asyncio.Event()
    running = asyncio.Semaphore(0)

    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        running.release()
        await release.wait()
        return ResendReply("running")

    to = DECODE_RESEND(worker=unique("d"))
    await bus_pair.server.serve(to, handler, limit=2)
    calls = [asyncio.create_task(bus_pair.client.call(to, ASK, soon())) for _ in range(2)]
    for _ in calls:
        await running.acquire()
    with pytest.raises(Overloaded):
        await bus_pair.client.call(to, ASK, soon())
    release.set()
    assert await asyncio.gather(*calls) == [ResendReply("running")] * 2


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x80", b"\x93\x01", b"\xdf\xff\xff\xff\xff", b"x" * 1000])
async def test_garbage_is_answered_counted_and_survived(bus_pair: BusPair, unique: Unique, garbage: bytes) -> None:
    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        return ResendReply("unknown")

    to = DECODE_RESEND(worker=unique("d"))
    await bus_pair.server.serve(to, handler)
    reply = await raw_request(bus_pair, to.name, garbage, {})
    assert b"invalid_request" in reply.data
    assert bus_pair.server.malformed == 1
    bus_pair.client.transport.send(to.name, garbage)  # and without a reply subject
    assert await bus_pair.client.call(to, ASK, soon()) == ResendReply("unknown")
    assert bus_pair.server.malformed == 2


@pytest.mark.parametrize("headers", [{"pd-deadline": "soon"}, {"pd-budget": "nan"}, {"pd-id": "x" * 1000}])
async def test_garbage_headers_are_answered(bus_pair: BusPair, unique: Unique, headers: dict[str, str]) -> None:
    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        pytest.fail("the handler was called")

    to = DECODE_RESEND(worker=unique("d"))
    await bus_pair.server.serve(to, handler)
    assert b"invalid_request" in (await raw_request(bus_pair, to.name, b"\x80", headers)).data


async def test_an_unreadable_reply_is_corrupt(bus_pair: BusPair, unique: Unique) -> None:
    to = DECODE_RESEND(worker=unique("d"))
    server = bus_pair.server.transport
    await server.subscribe(to.name, lambda raw: server.send(raw.reply, b"\xc1"))
    with pytest.raises(Corrupt):
        await bus_pair.client.call(to, ASK, soon())


async def test_a_message_above_the_limit_is_a_clear_error_and_harms_nothing(bus_pair: BusPair, unique: Unique) -> None:
    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        return ResendReply("unknown")

    to = DECODE_RESEND(worker=unique("d"))
    await bus_pair.server.serve(to, handler)
    fits = bus_pair.client.transport.max_payload
    for length in (fits, fits - 100):  # the second is too large only together with its headers
        with pytest.raises(TooLarge):
            await bus_pair.client.call(to, Resend("r" * length, 0, 1, 0), soon())
    assert await bus_pair.client.call(to, ASK, soon()) == ResendReply("unknown")


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


async def test_a_silent_sender_is_given_up(bus_pair: BusPair, unique: Unique, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LONGEST_SILENCE_S", 0.1)
    to = INFER(model=unique("m"))
    await bus_pair.server.transport.subscribe(to.name, lambda raw: None)
    with pytest.raises(Unavailable, match="silent"):
        async with bus_pair.client.stream(to, ASK_STREAM, soon(60)) as replies:
            await anext(replies)


async def test_a_slow_handler_that_is_alive_is_waited_for(
    bus_pair: BusPair, unique: Unique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "LONGEST_SILENCE_S", 0.3)
    monkeypatch.setattr(serving, "KEEPALIVE_S", 0.05)

    async def handler(message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        await asyncio.sleep(0.8)
        yield InferReply({})

    to = INFER(model=unique("m"))
    await bus_pair.server.serve(to, handler)
    async with bus_pair.client.stream(to, ASK_STREAM, soon(60)) as replies:
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


async def test_closing_a_registration_tells_the_callers(bus_pair: BusPair, unique: Unique) -> None:
    running = asyncio.Event()

    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        running.set()
        await asyncio.sleep(60)
        return ResendReply("running")

    to = DECODE_RESEND(worker=unique("d"))
    registration = await bus_pair.server.serve(to, handler)
    call = asyncio.create_task(bus_pair.client.call(to, ASK, soon(60)))
    await running.wait()
    await registration.close()
    with pytest.raises(Unavailable):
        await call
    with pytest.raises(Unavailable):
        await bus_pair.client.call(to, ASK, soon())


async def test_draining_finishes_what_runs(bus_pair: BusPair, unique: Unique) -> None:
    running, release = asyncio.Event(), asyncio.Event()

    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        running.set()
        await release.wait()
        return ResendReply("finished")

    to = DECODE_RESEND(worker=unique("d"))
    registration = await bus_pair.server.serve(to, handler)
    call = asyncio.create_task(bus_pair.client.call(to, ASK, soon(60)))
    await running.wait()
    drain = asyncio.create_task(registration.drain(Deadline.after(30)))
    with pytest.raises(Unavailable):
        await ask_until_refused(bus_pair, to)
    release.set()
    await drain
    assert await call == ResendReply("finished")


async def ask_until_refused(pair: BusPair, to: To[Resend, ResendReply]) -> None:
    """What comes in before the intake is closed is served, by a handler that is stuck here."""
    while True:
        with suppress(DeadlineExceeded):
            await pair.client.call(to, ASK, soon(0.05))


async def raw_request(pair: BusPair, subject: str, data: bytes, headers: dict[str, str]) -> Raw:
    """A request by a caller without this library."""
    reply: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()
    inbox = f"_INBOX.{id(reply)}"
    subscription = await pair.client.transport.subscribe(inbox, reply.set_result)
    pair.client.transport.send(subject, data, reply=inbox, headers=headers)
    async with asyncio.timeout(30):
        raw = await reply
    await subscription.close()
    assert raw.headers != CALLER_GONE
    return raw
