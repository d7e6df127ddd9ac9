"""Calls: the same on the twin and on a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

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
from pdbus.messages.router import InferRequest
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
    assert time.monotonic() < seen[0].deadline.at_monotonic_s <= ctx.deadline.at_monotonic_s + 0.01


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
