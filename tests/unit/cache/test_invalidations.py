"""A node is in step with the log of invalidations, or serves nothing, or has forgotten everything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.bus.follower import Record
from pdbus.cache.invalidations import Invalidations
from pdbus.caching.entry import Entry
from pdbus.caching.store import Store
from pdbus.errors import Conflict, Corrupt, Unavailable
from pdbus.messages.workers import Invalidated

R1, R2 = b"\x01" * 32, b"\x02" * 32
LAG_S = 5.0


class ScriptedLog:
    """Stands for `bus.logs`: gives out what a test puts in; an exception is raised by the follower."""

    def __init__(self) -> None:
        self.feed: asyncio.Queue[Record[Invalidated] | Exception] = asyncio.Queue()
        self.followed_after: list[int] = []
        self.confirmed_at = float("-inf")

    def follow(self, to: Any, after: int = 0) -> ScriptedLog:
        self.followed_after.append(after)
        return self

    async def __aenter__(self) -> ScriptedLog:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    def __aiter__(self) -> ScriptedLog:
        return self

    async def __anext__(self) -> Record[Invalidated]:
        given = await self.feed.get()
        self.feed.task_done()
        if isinstance(given, Exception):
            raise given
        return given

    async def give(self, seq: int, **entry: Any) -> None:
        self.feed.put_nowait(Record(seq, 0, Invalidated("m", **entry)))
        await self.feed.join()
        await asyncio.sleep(0)


@pytest.fixture
def log() -> ScriptedLog:
    return ScriptedLog()


@pytest.fixture
def store() -> Store:
    return Store(1 << 20, "incarnation 1")


@pytest.fixture
async def following(log: ScriptedLog, store: Store) -> AsyncIterator[Invalidations]:
    bus: Any = SimpleNamespace(logs=log, recorder=None)
    async with Invalidations(bus, store, LAG_S) as following:
        yield following


def hold(store: Store, root: bytes, name: str = "") -> None:
    now_s = time.monotonic()
    entry = Entry("result", root, root, "t", b"m", b"v", 1, now_s, now_s + 60.0, name=name)
    store.put(entry, store.fences.told)


async def test_it_serves_only_while_the_end_of_the_log_was_confirmed_lately(
    log: ScriptedLog, following: Invalidations
) -> None:
    with pytest.raises(Unavailable):
        following.check()
    await asyncio.sleep(0)
    log.confirmed_at = time.monotonic()
    following.check()
    log.confirmed_at = time.monotonic() - LAG_S - 0.1
    with pytest.raises(Unavailable):
        following.check()


async def test_entries_of_the_log_delete_and_fence_and_let_in_again(
    log: ScriptedLog, store: Store, following: Invalidations
) -> None:
    hold(store, R1)
    hold(store, R2)
    await log.give(7, action="delete", root=R1)
    assert len(store) == 1
    with pytest.raises(Conflict):
        hold(store, R1)
    await log.give(8, action="delete", root=R1, second=True)
    with pytest.raises(Conflict):
        hold(store, R1)
    await log.give(9, action="restore", root=R1)
    hold(store, R1)
    assert following.seq == 9


async def test_names_are_deleted_and_fenced(log: ScriptedLog, store: Store, following: Invalidations) -> None:
    told = store.fences.told
    hold(store, R1, name="user 1")
    await log.give(1, action="delete_name", name="user 1", generation=5)
    assert len(store) == 0
    with pytest.raises(Conflict):
        store.fences.check(R1, "user 1", told)
    hold(store, R1, name="user 1")


async def test_lost_entries_make_it_forget_everything_and_take_a_new_incarnation(
    log: ScriptedLog, store: Store, following: Invalidations
) -> None:
    await log.give(7, action="restore", root=R2)
    hold(store, R1)
    await log.give(9, action="restore", root=R2)
    assert len(store) == 0
    assert store.fences.incarnation != "incarnation 1"


async def test_a_log_made_anew_is_read_from_its_start_with_an_empty_store(
    log: ScriptedLog, store: Store, following: Invalidations
) -> None:
    await log.give(7, action="delete", root=R2)
    hold(store, R1)
    log.confirmed_at = time.monotonic()
    log.feed.put_nowait(Corrupt("made anew"))
    await log.feed.join()
    await asyncio.sleep(0)
    assert len(store) == 0
    with pytest.raises(Unavailable):
        following.check()
    await log.give(1, action="delete", root=R1)
    assert log.followed_after == [0, 0]
    assert store.fences.buried(R1)
    assert not store.fences.buried(R2)
