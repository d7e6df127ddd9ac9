"""The index follows its workers: also those that were there before, that restart, and that lose a message."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pdbus.bus.bus import Bus, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.bus.presence import Fleet
from pdbus.context import RequestContext
from pdbus.messages.presence import Card
from pdbus.messages.router import KvIndex, KvIndexSnapshot, KvIndexWanted
from pdbus.router import kv_follower
from pdbus.router.kv_follower import KvFollower
from pdbus.subjects import KVINDEX, KVINDEX_SNAPSHOT, PRESENCE
from tests.support.cards import card
from tests.support.router_rig import until

KEYS = [b"%8d" % n for n in range(10)]


class Told:
    """A worker's side of the index, by hand."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.card = replace(card("prefill", "w"), seq=0)
        self.snapshot = KvIndexSnapshot("i", 0, b"")
        self.asked = 0

    async def show(self, **changed: object) -> None:
        self.card = replace(self.card, seq=self.card.seq + 1, **changed)  # type: ignore[arg-type]
        await self._bus.publish(PRESENCE(service=self.card.service, id=self.card.id), self.card)

    async def tell(self, seq: int, *keys: bytes, incarnation: str = "i", worker: str = "w") -> None:
        await self._bus.publish(KVINDEX(worker=worker), KvIndex(worker, incarnation, seq, keys))

    async def serve(self) -> None:
        async def answer(message: KvIndexWanted, ctx: RequestContext) -> KvIndexSnapshot:
            self.asked += 1
            return self.snapshot

        await self._bus.serve(KVINDEX_SNAPSHOT(worker="w"), answer)


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with memory_bus(MemoryBroker()) as made:
        yield made


@pytest.fixture
async def fleet(bus: Bus) -> AsyncIterator[Fleet]:
    async with Fleet(bus) as made:
        yield made


@pytest.fixture
async def index(bus: Bus, fleet: Fleet) -> AsyncIterator[KvFollower]:
    async with KvFollower(bus, fleet, "m", random.Random(1)) as made:
        yield made


@pytest.fixture
def told(bus: Bus) -> Told:
    return Told(bus)


async def test_who_was_there_before_is_asked_once(index: KvFollower, told: Told):
    told.snapshot = KvIndexSnapshot("i", 7, b"".join(KEYS))
    await told.serve()
    await told.show()
    await until(lambda: index.table.keys_of("w") == 10)
    await told.show()
    await told.tell(8, b"another.")
    await until(lambda: index.table.keys_of("w") == 11)
    assert told.asked == 1


async def test_who_is_starting_is_asked_once_it_is_ready(index: KvFollower, told: Told, fleet: Fleet):
    await told.show(state="starting")
    await until(lambda: fleet.card("w") is not None)
    assert not index._asking
    await told.serve()
    await told.show(state="ready")
    await until(lambda: told.asked == 1)


async def test_a_gap_is_repaired(index: KvFollower, told: Told):
    await told.serve()
    await told.show()
    await until(lambda: told.asked == 1)
    await told.tell(1, KEYS[0])
    told.snapshot = KvIndexSnapshot("i", 3, b"".join(KEYS[:3]))
    for seq in (3, 4):  # and only one question for both
        await told.tell(seq, KEYS[seq - 1])
    await until(lambda: index.table.keys_of("w") == 4)
    assert told.asked == 2


async def test_a_new_life_is_asked_anew(index: KvFollower, told: Told):
    """LESSONS, first table, 15."""
    told.snapshot = KvIndexSnapshot("i", 7, b"".join(KEYS))
    await told.serve()
    await told.show()
    await until(lambda: index.table.keys_of("w") == 10)
    told.snapshot = KvIndexSnapshot("j", 0, b"")
    await told.show(incarnation="j")
    await until(lambda: index.table.incarnation("w") == "j")
    assert index.table.keys_of("w") == 0
    await told.tell(1, KEYS[5], incarnation="j")
    await told.tell(8, KEYS[0])  # of the former life, late
    await told.tell(2, KEYS[6], incarnation="j")
    await until(lambda: index.table.keys_of("w") == 2)
    assert told.asked == 2


async def test_the_dead_are_forgotten_and_asked_when_they_come_back(index: KvFollower, told: Told, fleet: Fleet):
    told.snapshot = KvIndexSnapshot("i", 7, b"".join(KEYS))
    await told.serve()
    await told.show()
    await until(lambda: index.table.keys_of("w") == 10)
    await until(lambda: fleet.state("w") == "dead" and index.table.incarnation("w") is None)
    await told.show()
    await until(lambda: index.table.keys_of("w") == 10)
    assert told.asked == 2


async def test_a_worker_that_does_not_answer_is_left_alone_for_a_while(
    index: KvFollower, told: Told, monkeypatch: pytest.MonkeyPatch, bus: Bus
):
    calls: list[object] = []
    call = bus.call
    monkeypatch.setattr(bus, "call", lambda *args: calls.append(args) or call(*args))
    monkeypatch.setattr(kv_follower, "backoff_s", lambda *_: 0.0)
    await told.show()
    await until(lambda: len(calls) == kv_follower._MOST_TRIES and not index._asking)
    for seq in range(5, 50):
        await told.tell(seq, KEYS[0])
    await until(lambda: len(index.table._workers["w"].held) > 40)
    assert len(calls) == kv_follower._MOST_TRIES


@pytest.mark.parametrize("changed", [{"model": "another"}, {"service": "cache"}, {"embeds": True}])
async def test_others_are_not_listened_to(index: KvFollower, told: Told, changed: dict[str, object], fleet: Fleet):
    await told.serve()
    await told.show(**changed)
    await until(lambda: fleet.card("w") is not None)
    await told.tell(1, KEYS[0])
    await told.tell(1, KEYS[0], worker="stranger")
    other = Card("prefill", "x", "i", 1, "ready", "m")
    await told._bus.publish(PRESENCE(service="prefill", id="x"), other)
    await until(lambda: fleet.card("x") is not None)
    assert (told.asked, index.table.keys_of("w"), index.table.keys_of("stranger")) == (0, 0, 0)
