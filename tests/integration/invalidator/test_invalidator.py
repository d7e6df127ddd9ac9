"""The versioned double delete, on a real server: both deletes, rollbacks, several invalidators, kill -9 in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.bus.bus import Bus, connect
from pdbus.bus.presence import Fleet
from pdbus.cache.service import CacheService
from pdbus.cache.settings import CacheSettings
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict
from pdbus.invalidator import service as invalidator_service
from pdbus.invalidator.service import InvalidatorService
from pdbus.invalidator.settings import InvalidatorSettings
from pdbus.messages.cache import CacheGet, CachePut
from pdbus.messages.changelog import Commit, LogEntry, Ref
from pdbus.messages.workers import Invalidated
from pdbus.peers.cache_node import CacheNode
from pdbus.subjects import CHANGELOG, DELETES, INVALIDATED, Subject
from tests.support.living import living
from tests.support.until import until

LIMIT_S = 100.0


class World:
    """A model's change log, a cache node, and what the log of invalidations says of the model."""

    def __init__(self, bus: Bus, node: CacheService, model: str) -> None:
        self.bus, self.node, self.model = bus, node, model
        self.roots = [sha256(f"{model} {number}".encode()).digest() for number in range(2)]
        self.seen: list[Invalidated] = []
        self._news = asyncio.Event()

    async def follow(self) -> None:
        async with self.bus.logs.follow(INVALIDATED()) as follower:
            async for record in follower:
                if record.entry.model == self.model:
                    self.seen.append(record.entry)
                    self._news.set()

    async def see(self, *steps: str) -> None:
        """Waits until exactly these are in the log: "first", "second", "restore"."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.seen) < len(steps):
                self._news.clear()
                await self._news.wait()
        assert self.steps == list(steps)

    @property
    def steps(self) -> list[str]:
        names = {("delete", False): "first", ("delete", True): "second", ("restore", False): "restore"}
        return [names[entry.action, entry.second] for entry in self.seen]

    async def commit(self) -> None:
        for number, root in enumerate(self.roots):
            entry = LogEntry(commit=Commit(f"{self.model} {number}", root, None, "test", "", ()))
            await self.bus.logs.append(CHANGELOG(model=self.model), entry)
            await self.point(number)

    async def point(self, number: int) -> None:
        entry = LogEntry(ref=Ref("stable", self.roots[number], "test"))
        await self.bus.logs.append(CHANGELOG(model=self.model), entry)

    async def put(self, number: int) -> bool:
        root = self.roots[number]
        put = CachePut("result", root, root, "t", b"m", 600_000, 5)
        return await CacheNode(self.bus, self.node.settings.id).put(put, b"value", RequestContext.after(30.0))

    async def holds(self, number: int) -> bool:
        root = self.roots[number]
        wanted = CacheGet("result", (root,), root)
        node = CacheNode(self.bus, self.node.settings.id)
        return await node.get(wanted, [b"m"], RequestContext.after(30.0)) == [b"value"]

    async def node_in_step(self) -> None:
        last = await self.bus.logs.last_seq(INVALIDATED())
        await until(lambda: self.node.invalidations.seq >= last)


class Clock:
    """Of the invalidators in this process. While it stands still nothing comes due, however long the test takes."""

    def __init__(self) -> None:
        self._stopped_ns: int | None = None

    def time_ns(self) -> int:
        return time.time_ns() if self._stopped_ns is None else self._stopped_ns

    def stop(self) -> None:
        self._stopped_ns = self.time_ns()

    def go_on(self) -> None:
        self._stopped_ns = None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(invalidator_service, "time", SimpleNamespace(time_ns=clock.time_ns))
    return clock


@pytest.fixture
async def world(nats_url: str, unique: Callable[[str], str]) -> AsyncIterator[World]:
    model, name = unique("model"), unique("cache")
    settings = CacheSettings(nats_url=nats_url, id=name, model=model, cache_bytes=16 << 20)
    async with (
        connect(nats_url, name="test") as bus,
        Fleet(bus) as fleet,
        connect(nats_url, name=name) as node_bus,
        living(CacheService(settings, node_bus)) as node,
    ):
        await fleet.wait_for(
            lambda fleet: (card := fleet.card(name)) is not None and card.state == "ready", Deadline.after(30.0)
        )
        world = World(bus, node, model)
        following = asyncio.create_task(world.follow())
        try:
            yield world
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


@contextlib.asynccontextmanager
async def invalidator(
    nats_url: str, world: World, name: str, *, window_s: float, longest_s: float
) -> AsyncIterator[InvalidatorService]:
    settings = InvalidatorSettings(
        nats_url=nats_url, id=name, model=world.model, rollback_window_s=window_s, longest_deadline_s=longest_s
    )
    async with connect(nats_url, name=name) as bus, living(InvalidatorService(settings, bus)) as service:
        yield service


async def test_what_a_root_left_behind_is_deleted_twice(
    nats_url: str, world: World, unique: Callable[[str], str]
) -> None:
    async with invalidator(nats_url, world, unique("inv"), window_s=0.3, longest_s=0.3):
        assert await world.put(0)
        assert await world.put(1)
        await world.commit()
        await world.see("first", "second")
        await world.node_in_step()
        assert not await world.holds(0)
        assert await world.holds(1), "the live root stays"
        with pytest.raises(Conflict):
            await world.put(0)


async def test_a_rollback_within_the_window_leaves_everything_as_it_was(
    nats_url: str, world: World, unique: Callable[[str], str], clock: Clock
) -> None:
    clock.stop()
    async with invalidator(nats_url, world, unique("inv"), window_s=0.6, longest_s=0.2) as service:
        await world.put(0)
        await world.put(1)
        await world.commit()
        await until(lambda: service.load().waiting == 1)  # the delete of 0 is to come
        await world.point(0)  # now 1 has left instead
        await until(lambda: {reminder.root for reminder in service._reminded} == {world.roots[1]})
        clock.go_on()
        await world.see("first", "second")
        await world.node_in_step()
        assert {entry.root for entry in world.seen} == {world.roots[1]}
        assert await world.holds(0)
        assert not await world.holds(1)


async def test_a_rollback_after_the_first_delete_lets_the_root_in_again(
    nats_url: str, world: World, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    async with invalidator(nats_url, world, unique("inv"), window_s=0.2, longest_s=0.5) as service:
        append = service.bus.logs.append

        async def stopping(to: Any, message: Any, **options: Any) -> int:
            if to.subject == INVALIDATED:  # the first delete: the second has to wait for the rollback
                clock.stop()
            return await append(to, message, **options)

        with monkeypatch.context() as patched:
            patched.setattr(service.bus.logs, "append", stopping)
            await world.commit()
            await world.see("first")
        await world.point(0)
        await world.see("first", "restore")
        await world.node_in_step()
        assert await world.put(0)
        clock.go_on()
        await world.see("first", "restore", "first", "second")  # of the other root now
        assert {entry.root for entry in world.seen[2:]} == {world.roots[1]}
        await world.node_in_step()
        assert await world.holds(0)


async def test_several_invalidators_delete_once_each(nats_url: str, world: World, unique: Callable[[str], str]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(invalidator(nats_url, world, unique("inv"), window_s=0.3, longest_s=0.5))
        await world.commit()
        await world.see("first", "second")
    async with invalidator(nats_url, world, unique("inv"), window_s=0.3, longest_s=0.5):
        await world.point(0)
        await world.see("first", "second", "restore", "first", "second")  # a restart repeats nothing


@pytest.mark.parametrize("durable", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("subject", [DELETES, INVALIDATED], ids=["reminder", "delete"])
async def test_a_crash_at_any_step_loses_and_repeats_nothing(
    nats_url: str,
    world: World,
    unique: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    subject: Subject,
    second: bool,
    durable: bool,
) -> None:
    """The invalidator ends just before or just after that message is durable; another one takes over."""
    crashed = asyncio.Event()
    async with invalidator(nats_url, world, unique("inv"), window_s=0.1, longest_s=0.2) as service:
        append = service.bus.logs.append

        async def crashing(to: Any, message: Any, **options: Any) -> int:
            here = to.subject == subject and message.second == second
            if here and durable:
                await append(to, message, **options)
            if here or crashed.is_set():
                crashed.set()
                raise asyncio.CancelledError
            return await append(to, message, **options)

        monkeypatch.setattr(service.bus.logs, "append", crashing)
        await world.commit()
        await asyncio.wait_for(crashed.wait(), LIMIT_S)
    async with invalidator(nats_url, world, unique("inv"), window_s=0.1, longest_s=0.2):
        await world.see("first", "second")


@pytest.mark.parametrize("killed_after", ["ref", "first"])
async def test_kill_9_loses_no_delete(
    nats_url: str, world: World, unique: Callable[[str], str], killed_after: str
) -> None:
    first = await start(nats_url, world, unique("inv"))
    try:
        await world.put(0)
        await world.commit()
        if killed_after == "first":
            await until(lambda: bool(world.seen))  # the second, too, where the machine is that slow
    finally:
        first.kill()
        await first.wait()
    second = await start(nats_url, world, unique("inv"))
    try:
        await world.see("first", "second")
        await world.node_in_step()
        assert not await world.holds(0)
        with pytest.raises(Conflict):
            await world.put(0)
    finally:
        second.terminate()
        assert await asyncio.wait_for(second.wait(), 100) == 0


async def start(nats_url: str, world: World, name: str) -> Process:
    environ = {
        **os.environ,
        "NATS_URL": nats_url,
        "PDBUS_ID": name,
        "PDBUS_MODEL": world.model,
        "PDBUS_ROLLBACK_WINDOW_S": "0.5",
        "PDBUS_LONGEST_DEADLINE_S": "1.5",
    }
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "pdbus.invalidator", env=environ)
