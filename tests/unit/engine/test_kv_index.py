"""Routers that follow a worker's index know its pages, and a snapshot is exactly as of its number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from pdbus.bus.bus import Bus, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.context import RequestContext
from pdbus.engine import kv_index
from pdbus.engine.core import Core
from pdbus.engine.kv_index import KvIndexPublisher
from pdbus.engine.scheduler import Limits
from pdbus.kv import changes
from pdbus.kv.format import PageFormat
from pdbus.kv.page_hold import PageHold
from pdbus.kv.pool import KvPool
from pdbus.kv.prefix import PageKey
from pdbus.messages.router import KvIndex, KvIndexSnapshot, KvIndexWanted
from pdbus.subjects import ANY, KVINDEX, KVINDEX_SNAPSHOT
from tests.support.asking import until


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "little"), (number,), bytes(32))


def cut(*numbers: int) -> set[bytes]:
    return {key(number).digest[:8] for number in numbers}


@dataclass
class Follower:
    """A router's table of one worker."""

    bus: Bus
    messages: list[KvIndex] = field(default_factory=list)
    keys: set[bytes] = field(default_factory=set)

    def hear(self, message: KvIndex) -> None:
        self.messages.append(message)
        if message.clear:
            self.keys.clear()
        self.keys |= set(message.stored)
        self.keys -= set(message.evicted)

    async def snapshot(self) -> tuple[KvIndexSnapshot, set[bytes]]:
        reply = await self.bus.call(KVINDEX_SNAPSHOT(worker="w"), KvIndexWanted(), RequestContext.after(30))
        return reply, {reply.keys[at : at + 8] for at in range(0, len(reply.keys), 8)}


@asynccontextmanager
async def worker(pages: int = 8) -> AsyncIterator[tuple[Core, Follower, Bus]]:
    broker = MemoryBroker()
    pool = KvPool(PageFormat(layers=1, kv_heads=1, head_dim=2, page_tokens=4), pages)
    async with (
        memory_bus(broker) as bus,
        memory_bus(broker) as router,
        Core(pool, Limits(4, 8, 8), lambda events: None, lambda error: None) as core,
    ):
        follower = Follower(router)
        async with await router.subscribe(KVINDEX(worker=ANY), follower.hear), KvIndexPublisher(bus, "w", core):
            yield core, follower, bus


async def published(core: Core, *numbers: int) -> PageHold:
    hold = core.pages.hold()

    def publish() -> None:
        for page, number in zip(hold.allocate(len(numbers)), numbers, strict=True):
            core.pages.publish(page, key(number))

    await core.call(publish)
    return hold


async def test_what_is_stored_and_evicted_is_told_with_numbers_from_one_on() -> None:
    async with worker() as (core, follower, bus):
        (await published(core, 1, 2, 3)).release()
        await until(lambda: follower.keys == cut(1, 2, 3))
        await core.call(lambda: core.pages.drop([key(2).digest]))
        await until(lambda: follower.keys == cut(1, 3))
        for number in range(10, 18):  # of 8 pages: the oldest are reclaimed
            hold = await published(core, number)
            await core.call(hold.release)
        await until(lambda: follower.keys == cut(*range(10, 18)))
        assert [message.seq for message in follower.messages] == list(range(1, len(follower.messages) + 1))
        assert {message.incarnation for message in follower.messages} == {bus.incarnation}
        assert [message.clear for message in follower.messages] == [True] + [False] * (len(follower.messages) - 1)


async def test_many_changes_soon_after_another_are_few_messages() -> None:
    async with worker(pages=200) as (core, follower, _):
        started_s = asyncio.get_running_loop().time()
        for number in range(150):
            await published(core, number)
        await until(lambda: len(follower.keys) == 150)
        taken_s = asyncio.get_running_loop().time() - started_s
        assert len(follower.messages) <= 2 + taken_s / 0.05


async def test_a_snapshot_is_as_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_index, "_MOST_KEYS", 3)
    async with worker(pages=40) as (core, follower, bus):
        empty, keys = await follower.snapshot()
        assert (empty.seq, keys, empty.incarnation) == (0, set(), bus.incarnation)
        for number in range(10):
            await published(core, number)
            reply, keys = await follower.snapshot()
            heard = Follower(bus)
            for message in follower.messages[: reply.seq]:
                heard.hear(message)
            assert keys == heard.keys
        await until(lambda: len(follower.keys) == 10)
        assert max(len(message.stored) for message in follower.messages) <= 3
        assert (await follower.snapshot())[1] == follower.keys


async def test_where_changes_were_lost_all_is_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST_CHANGES", 4)
    async with worker(pages=20) as (core, follower, _):
        await published(core, *range(12))
        await until(lambda: follower.keys == cut(*range(12)))
        assert any(message.clear for message in follower.messages)
        assert (await follower.snapshot())[1] == follower.keys
