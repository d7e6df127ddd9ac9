"""Bulk over a transport that loses, doubles, reorders and damages frames and credit."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdbus.bus import bulk_frames
from pdbus.bus.bulk import BulkPort
from pdbus.bus.instruments import Instruments
from pdbus.bus.memory import MemoryBroker, MemoryTransport
from pdbus.context import Deadline
from pdbus.errors import Unavailable
from pdbus.messages.bulk import BlockHead
from pdbus.subjects import TRANSFER
from tests.support.faulty import FaultyTransport
from tests.support.simulated_time import simulated

FAULTS = 40
"""Of each end, at most."""


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of 100 bytes and silences of 5 ms: a transfer of many frames with many repairs takes a moment.

    With so many losses three silences in a row are mere chance: to give up takes more than there are faults."""
    monkeypatch.setattr(bulk_frames, "SILENCES", 2 * FAULTS + 10)
    monkeypatch.setattr(bulk_frames, "FRAME_BYTES", 100)
    monkeypatch.setattr(bulk_frames, "SILENCE_S", 0.005)


async def transfer(sender: FaultyTransport, receiver: FaultyTransport, bodies: list[bytes]) -> list[tuple[int, bytes]]:
    source, target = BulkPort(sender, Instruments()), BulkPort(receiver, Instruments())

    async def send(stream: str) -> None:
        async with source.send(TRANSFER.name(address=target.address, stream=stream), Deadline.after(30)) as out:
            for index, body in enumerate(bodies):
                await out.item(BlockHead(index), body)

    async with target.receive() as incoming:
        sending = asyncio.create_task(send(incoming.stream))
        items = [(head.index, bytes(body)) async for head, body in incoming.items(BlockHead, Deadline.after(30))]
    await sending
    assert source.open_streams == target.open_streams == 0
    await source.stop()
    await target.stop()
    return items


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(0, 350), max_size=25),
    chances=st.tuples(*[st.sampled_from([0.0, 0.05, 0.3])] * 4),
)
def test_every_item_arrives_once_and_in_order(seed: int, sizes: list[int], chances: tuple[float, ...]) -> None:
    lose, double, delay, damage = chances
    generator = random.Random(seed)
    bodies = [generator.randbytes(size) for size in sizes]

    async def run() -> None:
        broker = MemoryBroker()
        ends = [
            # Frames carry a checksum; credit relies on TCP's.
            FaultyTransport(
                MemoryTransport(broker), seed + end, lose, double, delay, damage if end == 0 else 0.0, FAULTS
            )
            for end in (0, 1)
        ]
        assert await transfer(*ends, bodies) == list(enumerate(bodies))

    asyncio.run(run())


def test_a_lost_frame_costs_a_resend_of_the_window_at_most() -> None:
    """In simulated seconds, as the next: on a busy machine a moment's delay would be a silence too."""
    broker = MemoryBroker()
    sender = FaultyTransport(MemoryTransport(broker), seed=3, lose=0.05, most_faults=1)
    receiver, bodies = FaultyTransport(MemoryTransport(broker)), [b"x" * 100] * 200
    assert len(simulated(lambda: transfer(sender, receiver, bodies))) == 200
    assert sender.faults == 1
    assert len(sender.sent) <= 201 + 2 * bulk_frames.WINDOW_FRAMES


def test_without_faults_nothing_is_sent_twice() -> None:
    broker = MemoryBroker()
    sender, receiver = (FaultyTransport(MemoryTransport(broker)) for _ in range(2))
    simulated(lambda: transfer(sender, receiver, [b"x" * 100] * 400))
    assert len(sender.sent) == 401
    assert len(receiver.sent) <= 401 / (bulk_frames.WINDOW_FRAMES // 2) + 3


async def test_a_link_that_loses_everything_is_given_up_on_both_sides() -> None:
    broker = MemoryBroker()
    sender = FaultyTransport(MemoryTransport(broker))
    source, target = BulkPort(sender, Instruments()), BulkPort(MemoryTransport(broker), Instruments())
    async with target.receive() as incoming:
        items = incoming.items(BlockHead, Deadline.after(30))
        subject = TRANSFER.name(address=target.address, stream=incoming.stream)

        async def send() -> None:
            async with source.send(subject, Deadline.after(30)) as out:
                await out.item(BlockHead(0), b"x")
                await anext(items)
                sender.lose = 1.0
                while True:
                    await out.item(BlockHead(1), b"x")

        with pytest.raises(Unavailable):
            await send()
        with pytest.raises(Unavailable):
            await anext(items)
