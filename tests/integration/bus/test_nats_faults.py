"""What nats-py does wrong by itself (the table in bus/nats_client.py), and what a broken connection does to a bus."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import pytest

from pdbus.bus import bulk_frames
from pdbus.bus.bus import Bus, connect
from pdbus.bus.nats import NatsTransport
from pdbus.bus.transport import Raw
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Unavailable
from pdbus.messages.bulk import BlockHead
from pdbus.messages.workers import Cancel, Resend, ResendReply
from pdbus.subjects import CANCEL, DECODE_RESEND, TRANSFER
from tests.support.nats_peers import ASK, ask, client_of, serve
from tests.support.until import until

Unique = Callable[[str], str]


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with connect(nats_url, name="test") as bus:
        yield bus


async def test_a_barrier_is_one(bus: Bus, nats_url: str, unique: Unique) -> None:
    subject = f"test.{unique('barrier')}"
    async with connect(nats_url, name="other") as other:
        for round_ in range(20):
            got: list[Raw] = []
            subscription = await bus.transport.subscribe(subject, got.append)
            for _ in range(100):
                other.transport.send(subject, b"x")
            await other.transport.barrier()  # all are at the server, and routed to us
            await bus.transport.barrier()
            assert len(got) == 100, round_
            await subscription.close()


async def test_what_came_before_the_end_of_a_subscription_is_delivered(bus: Bus, nats_url: str, unique: Unique) -> None:
    subject = f"test.{unique('unsubscribe')}"
    got: list[Raw] = []
    async with connect(nats_url, name="other") as other:
        subscription = await bus.transport.subscribe(subject, got.append)
        for _ in range(1000):
            other.transport.send(subject, b"x")
        await other.transport.barrier()
        await subscription.close()
    assert len(got) == 1000


async def test_a_raising_callback_harms_nobody(bus: Bus, unique: Unique) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("a bug in a handler")

    await bus.subscribe(CANCEL(), fail)
    await bus.publish(CANCEL(), Cancel("r", 1, "r", ()))
    name = unique("d")
    await serve(bus, name)
    assert await ask(bus, name) == ResendReply("unknown")
    assert client_of(bus).alive


@pytest.mark.parametrize("break_it", ["reader dies", "protocol error", "socket aborted"])
async def test_a_connection_that_breaks_is_rebuilt_with_its_subscriptions(
    bus: Bus, unique: Unique, break_it: str
) -> None:
    name = unique("d")
    await serve(bus, name)
    got: list[Cancel] = []
    await bus.subscribe(CANCEL(), got.append)
    broken = client_of(bus)
    if break_it == "reader dies":
        broken._reading_task.cancel()
    elif break_it == "protocol error":
        broken._out.put(b"NONSENSE\r\n")
    else:
        broken._transport._io_writer.transport.abort()
    await until(lambda: not broken.alive)
    assert await ask(bus, name) == ResendReply("unknown")
    await bus.publish(CANCEL(), Cancel(name, 1, "r", ()))
    await until(lambda: [cancel.request_id for cancel in got] == [name])
    assert client_of(bus) is not broken


async def test_waiting_callers_learn_of_a_lost_connection_at_once(bus: Bus, nats_url: str, unique: Unique) -> None:
    asked = asyncio.Event()

    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        asked.set()
        await asyncio.sleep(600)
        return ResendReply("unknown")

    to = DECODE_RESEND(worker=unique("d"))
    async with connect(nats_url, name="other") as other:
        await other.serve(to, handler)
        call = asyncio.create_task(bus.call(to, ASK, RequestContext.after(60)))
        await asked.wait()
        client_of(bus)._transport._io_writer.transport.abort()
        async with asyncio.timeout(30):
            with pytest.raises(Unavailable):
                await call


async def test_bulk_survives_a_lost_connection(bus: Bus, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_frames, "SILENCE_S", 0.1)
    monkeypatch.setattr(bulk_frames, "SILENCES", 50)
    body = os.urandom(100_000)
    async with connect(nats_url, name="other") as other, bus.bulk.receive() as incoming:

        async def send() -> None:
            subject = TRANSFER.name(address=bus.bulk.address, stream=incoming.stream)
            async with other.bulk.send(subject, Deadline.after(30)) as out:
                for index in range(60):
                    await out.item(BlockHead(index), body)

        sending = asyncio.create_task(send())
        count = 0
        async for head, got in incoming.items(BlockHead, Deadline.after(30)):
            assert (head.index, bytes(got)) == (count, body)
            count += 1
            for at, port in ((20, bus.bulk), (40, other.bulk)):
                if count == at:
                    transport = port._transport
                    assert isinstance(transport, NatsTransport)
                    transport.client._transport._io_writer.transport.abort()
        assert count == 60
        await sending


async def test_closing_sends_what_was_published(bus: Bus, nats_url: str, unique: Unique) -> None:
    subject = f"test.{unique('close')}"
    got: list[Raw] = []
    await bus.transport.subscribe(subject, got.append)
    async with connect(nats_url, name="other") as other:
        for _ in range(500):
            other.transport.send(subject, b"x")
    await bus.transport.barrier()
    assert len(got) == 500


@pytest.mark.parametrize("subject", ["a b", "a\r\nPUB x 0", "", "ä"])
async def test_nothing_can_be_smuggled_into_the_protocol(bus: Bus, subject: str) -> None:
    with pytest.raises(ValueError, match="can't be sent to"):
        bus.transport.send(subject, b"x")
    with pytest.raises(ValueError, match="line end"):
        bus.transport.send("a", b"x", headers={"pd-id": "x\r\ny: z"})
    if subject:
        with pytest.raises(ValueError, match="can't be sent to"):
            bus.transport.send("a", b"x", reply=subject)
