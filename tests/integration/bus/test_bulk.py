"""Bulk streams: the same on the twin and on a real server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from pdbus.bus import bulk_frames
from pdbus.bus.bulk_receive import Incoming
from pdbus.context import Deadline
from pdbus.errors import Conflict, Corrupt, DeadlineExceeded, NotFound, RootGone, TooLarge, Unavailable
from pdbus.messages.bulk import BlockHead, KvHead
from pdbus.subjects import ANY, KV, TRANSFER
from tests.support.nats import BusPair, twin_pair
from tests.support.simulated_time import simulated

Unique = Callable[[str], str]


def soon(seconds: float = 30.0) -> Deadline:
    return Deadline.after(seconds)


async def read(incoming: Incoming) -> list[tuple[int, bytes]]:
    return [(head.index, bytes(body)) async for head, body in incoming.items(BlockHead, soon())]


def address_of(pair: BusPair, incoming: Incoming) -> str:
    return TRANSFER.name(address=pair.client.bulk.address, stream=incoming.stream)


async def test_items_arrive_whole_and_in_order_whatever_their_size(bus_pair: BusPair) -> None:
    frame = bulk_frames.FRAME_BYTES
    bodies = [os.urandom(size) for size in (0, 1, 1000, frame - 1, frame, frame + 1, 3 * frame + 17, 20 * frame, 0)]
    async with bus_pair.client.bulk.receive() as incoming:
        reader = asyncio.create_task(read(incoming))
        async with bus_pair.server.bulk.send(address_of(bus_pair, incoming), soon()) as out:
            for index, body in enumerate(bodies):
                await out.item(BlockHead(index), body)
        assert await reader == list(enumerate(bodies))
    assert bus_pair.client.bulk.open_streams == bus_pair.server.bulk.open_streams == 0


async def test_a_body_in_parts_arrives_as_one(bus_pair: BusPair) -> None:
    frame = bulk_frames.FRAME_BYTES
    bodies = [
        [os.urandom(size) for size in sizes]
        for sizes in ([5, 0, 7], [frame // 2, frame // 2], [frame - 1, 2, 1], [0, 0], [3 * frame, 10, frame])
    ]
    async with bus_pair.client.bulk.receive() as incoming:
        reader = asyncio.create_task(read(incoming))
        async with bus_pair.server.bulk.send(address_of(bus_pair, incoming), soon()) as out:
            for index, parts in enumerate(bodies):
                await out.item(BlockHead(index), *parts)
        assert await reader == [(index, b"".join(parts)) for index, parts in enumerate(bodies)]


async def test_a_slow_reader_holds_the_sender_to_the_window(bus_pair: BusPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_frames, "SILENCE_S", 0.05)
    monkeypatch.setattr(bulk_frames, "SILENCES", 200)  # a busy machine's broker may be silent for a while
    sent = 0

    async def send(subject: str) -> None:
        nonlocal sent
        async with bus_pair.server.bulk.send(subject, soon()) as out:
            for index in range(100):
                await out.item(BlockHead(index), b"x")
                sent += 1

    async with bus_pair.client.bulk.receive() as incoming:
        sender = asyncio.create_task(send(address_of(bus_pair, incoming)))
        await asyncio.sleep(0.5)  # many silences long: the receiver's port answers
        assert sent <= bulk_frames.WINDOW_FRAMES
        items = incoming.items(BlockHead, soon())
        await anext(items)
        await asyncio.sleep(0.3)
        assert sent <= bulk_frames.WINDOW_FRAMES + 1
        assert [head.index async for head, _ in items] == list(range(1, 100))
        await sender


async def test_a_pause_of_the_sender_is_no_loss(bus_pair: BusPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_frames, "SILENCE_S", 0.05)
    monkeypatch.setattr(bulk_frames, "SILENCES", 200)
    async with bus_pair.client.bulk.receive() as incoming:
        reader = asyncio.create_task(read(incoming))
        async with bus_pair.server.bulk.send(address_of(bus_pair, incoming), soon()) as out:
            await out.item(BlockHead(0), b"before")
            await asyncio.sleep(0.5)
            await out.item(BlockHead(1), b"after")
        assert await reader == [(0, b"before"), (1, b"after")]


def test_who_pauses_or_reads_slowly_is_not_given_up_however_long_it_takes() -> None:
    """In simulated seconds, many times as long as who is silent is waited for."""
    long_s = 4.0 * bulk_frames.SILENCES * bulk_frames.SILENCE_S

    async def read_slowly(incoming: Incoming) -> list[int]:
        found = []
        async for head, _ in incoming.items(BlockHead, soon(300)):
            await asyncio.sleep(long_s if head.index == 0 else 0.0)
            found.append(head.index)
        return found

    async def transfer() -> list[int]:
        async with twin_pair() as pair, pair.client.bulk.receive() as incoming:
            reader = asyncio.create_task(read_slowly(incoming))
            async with pair.server.bulk.send(address_of(pair, incoming), soon(300)) as out:
                for index in range(100):
                    await out.item(BlockHead(index), b"x")
                await asyncio.sleep(long_s)
                await out.item(BlockHead(100), b"x")
            return await reader

    assert simulated(transfer) == list(range(101))


async def test_the_sender_s_error_reaches_the_reader(bus_pair: BusPair) -> None:
    async with bus_pair.client.bulk.receive() as incoming:
        reader = asyncio.create_task(read(incoming))

        async def send() -> None:
            async with bus_pair.server.bulk.send(address_of(bus_pair, incoming), soon()) as out:
                await out.item(BlockHead(0), b"x")
                raise RootGone("dropped it")

        with pytest.raises(RootGone):
            await send()
        with pytest.raises(RootGone, match="dropped it"):
            await reader


async def test_a_cancelled_sender_is_told_to_the_reader(bus_pair: BusPair) -> None:
    begun = asyncio.Event()

    async def send(subject: str) -> None:
        async with bus_pair.server.bulk.send(subject, soon()) as out:
            await out.item(BlockHead(0), b"x")
            begun.set()
            await asyncio.sleep(60)

    async with bus_pair.client.bulk.receive() as incoming:
        sender = asyncio.create_task(send(address_of(bus_pair, incoming)))
        await begun.wait()
        sender.cancel()
        with pytest.raises(Exception, match="stopped") as caught:
            await read(incoming)
        assert getattr(caught.value, "code", None) == "cancelled"
    assert bus_pair.server.bulk.open_streams == 0


async def test_a_reader_that_leaves_stops_the_sender(bus_pair: BusPair) -> None:
    async def send(subject: str) -> None:
        async with bus_pair.server.bulk.send(subject, soon()) as out:
            while True:
                await out.item(BlockHead(0), b"x")

    async with bus_pair.client.bulk.receive() as incoming:
        sender = asyncio.create_task(send(address_of(bus_pair, incoming)))
        await anext(incoming.items(BlockHead, soon()))
    with pytest.raises(Exception, match="nothing more") as caught:
        await sender
    assert getattr(caught.value, "code", None) == "cancelled"


async def test_a_bad_head_is_corrupt_on_both_sides(bus_pair: BusPair) -> None:
    async def receive(incoming: Incoming) -> None:
        async for _ in incoming.items(KvHead, soon()):
            pass

    async with bus_pair.client.bulk.receive() as incoming:
        subject = address_of(bus_pair, incoming)

        async def send() -> None:
            async with bus_pair.server.bulk.send(subject, soon()) as out:
                await out.item(BlockHead(0), b"x")

        sender = asyncio.create_task(send())
        with pytest.raises(Corrupt) as caught:
            await receive(incoming)
        incoming.refuse(caught.value)
        with pytest.raises(Corrupt):
            await sender


async def test_frames_to_nobody_fail_at_once(bus_pair: BusPair, unique: Unique) -> None:
    gone = TRANSFER.name(address=unique("gone"), stream="s")
    with pytest.raises(Unavailable, match="nobody"):
        async with bus_pair.server.bulk.send(gone, soon()) as out:
            await out.item(BlockHead(0), b"x")


async def test_a_receiver_that_goes_for_good_is_given_up_soon(bus_pair: BusPair, unique: Unique) -> None:
    at = f"test.{unique('bulk')}"
    port = bus_pair.client.bulk
    subscription = await bus_pair.client.transport.subscribe(at, port._on_frame)
    async with port.receive_at(at) as incoming:
        items = incoming.items(BlockHead, soon())

        async def send() -> None:
            async with bus_pair.server.bulk.send(at, soon(60)) as out:
                await out.item(BlockHead(0), b"x")
                await anext(items)
                await subscription.close()
                while True:
                    await out.item(BlockHead(1), b"x")

        started = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable, match="nobody"):
            await send()
        assert asyncio.get_running_loop().time() - started < 20


async def test_frames_to_an_unknown_stream_are_refused(bus_pair: BusPair, unique: Unique) -> None:
    worker = unique("d")
    await bus_pair.client.bulk.listen(KV.name(worker=worker, session=ANY, attempt=ANY))
    unknown = TRANSFER.name(address=bus_pair.client.bulk.address, stream="unknown")
    async with bus_pair.client.bulk.receive():
        pass  # from its first stream on it listens
    for subject in (unknown, KV.name(worker=worker, session="s", attempt="1")):
        with pytest.raises(NotFound):
            async with bus_pair.server.bulk.send(subject, soon()) as out:
                await out.item(BlockHead(0), b"x")


async def test_a_stream_at_a_named_subject(bus_pair: BusPair, unique: Unique) -> None:
    worker = unique("d")
    await bus_pair.client.bulk.listen(KV.name(worker=worker, session=ANY, attempt=ANY))
    subject = KV.name(worker=worker, session="s.1", attempt="1")
    async with bus_pair.client.bulk.receive_at(subject) as incoming:
        with pytest.raises(Conflict):
            async with bus_pair.client.bulk.receive_at(subject):
                pass
        reader = asyncio.create_task(read(incoming))
        async with bus_pair.server.bulk.send(subject, soon()) as out:
            await out.item(BlockHead(7), b"kv")
        assert await reader == [(7, b"kv")]
    async with bus_pair.client.bulk.receive_at(subject):  # free again
        pass


async def test_a_second_sender_is_refused_and_does_no_harm(bus_pair: BusPair) -> None:
    async with bus_pair.client.bulk.receive() as incoming:
        subject = address_of(bus_pair, incoming)
        items = incoming.items(BlockHead, soon())
        async with bus_pair.server.bulk.send(subject, soon()) as first:
            await first.item(BlockHead(0), b"first")
            assert await anext(items) == (BlockHead(0), b"first")
            with pytest.raises(Conflict):
                async with bus_pair.client.bulk.send(subject, soon()) as second:
                    await second.item(BlockHead(0), b"second")
            rest = asyncio.create_task(read(incoming))
        assert await rest == []


async def test_deadlines_end_both_sides(bus_pair: BusPair) -> None:
    async with bus_pair.client.bulk.receive() as incoming:
        with pytest.raises(DeadlineExceeded):
            await anext(incoming.items(BlockHead, soon(0.1)))

        async def send() -> None:
            async with bus_pair.server.bulk.send(address_of(bus_pair, incoming), soon(0.2)) as out:
                while True:
                    await out.item(BlockHead(0), b"x")

        with pytest.raises(DeadlineExceeded):
            await send()


async def test_silence_is_given_up(bus_pair: BusPair, unique: Unique, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_frames, "SILENCE_S", 0.02)
    deaf = TRANSFER.name(address=unique("deaf"), stream="s")
    await bus_pair.client.transport.subscribe(deaf, lambda raw: None)
    with pytest.raises(Unavailable, match="silent"):
        async with bus_pair.server.bulk.send(deaf, soon(60)) as out:
            await out.item(BlockHead(0), b"x")


async def test_garbage_frames_change_nothing(bus_pair: BusPair) -> None:
    async with bus_pair.client.bulk.receive() as incoming:
        subject = address_of(bus_pair, incoming)
        reader = asyncio.create_task(read(incoming))
        async with bus_pair.server.bulk.send(subject, soon()) as out:
            for index in range(20):
                await out.item(BlockHead(index), b"x" * index)
                bus_pair.server.transport.send(subject, os.urandom(index * 5), reply="_INBOX.x")
                bus_pair.server.transport.send(f"pd.v1.credit.{bus_pair.server.bulk.address}", os.urandom(index))
        assert await reader == [(index, b"x" * index) for index in range(20)]
    await bus_pair.client.transport.barrier()
    assert bus_pair.client.malformed == 20


async def test_too_large_an_item_is_refused_by_the_sender(bus_pair: BusPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_frames, "LARGEST_ITEM_BYTES", 1000)
    async with bus_pair.client.bulk.receive() as incoming:
        with pytest.raises(TooLarge):
            async with bus_pair.server.bulk.send(address_of(bus_pair, incoming), soon()) as out:
                await out.item(BlockHead(0), bytes(1001))
        with pytest.raises(TooLarge):
            await read(incoming)


async def test_many_streams_share_the_memory_budget(bus_pair: BusPair) -> None:
    scopes = [bus_pair.client.bulk.receive() for _ in range(30)]
    streams = [await scope.__aenter__() for scope in scopes]
    assert sum(stream.window for stream in streams) <= 60
    with pytest.raises(DeadlineExceeded):
        async with bus_pair.client.bulk.receive(Deadline.after(0.05)):
            pass
    for scope in scopes:
        await scope.__aexit__(None, None, None)
    async with bus_pair.client.bulk.receive() as incoming:
        assert incoming.window == bulk_frames.WINDOW_FRAMES
