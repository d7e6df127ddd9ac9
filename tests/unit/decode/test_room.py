"""Who gets pages first where a pool is full, in simulated seconds."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from pdbus.context import Deadline
from pdbus.decode.room import ROOM_S, Room
from pdbus.errors import Overloaded
from pdbus.messages.decode import Reserve
from tests.support.simulated_time import simulated

RESERVE = Reserve("r", 0, 1, "router", bytes(32), 10, "p", "pages", "class", 0)
LOOK_S = 0.05


class Pool:
    def __init__(self) -> None:
        self.free = 0
        self.room = Room()
        self.got: dict[str, float] = {}
        self._begun = time.monotonic()

    async def ask(self, name: str, pages: int, **fields: object) -> None:
        async def take() -> None:
            if self.free < pages:
                raise Overloaded("full")
            self.free -= pages
            self.got[name] = time.monotonic() - self._begun

        await self.room.take(replace(RESERVE, **fields), Deadline.after(60), take)  # type: ignore[arg-type]


def test_a_large_one_is_not_overtaken_by_small_ones_and_interrupted_ones_go_first() -> None:
    """A page gets free every tenth of a second: each gets its own as soon as they are there."""

    async def run() -> dict[str, float]:
        pool = Pool()
        async with asyncio.TaskGroup() as asking:
            for name, pages, fields in (
                ("large", 8, {}),
                ("small", 1, {}),
                ("interrupted", 4, {"interrupted": True}),
                ("urgent", 2, {"priority": 9}),
            ):
                asking.create_task(pool.ask(name, pages, **fields))
                await asyncio.sleep(0)
            for _ in range(15):
                await asyncio.sleep(0.1)
                pool.free += 1
        return pool.got

    got = simulated(run)
    assert list(got) == ["urgent", "interrupted", "large", "small"]
    assert all(at <= due + LOOK_S for at, due in zip(got.values(), (0.2, 0.6, 1.4, 1.5), strict=True))


def test_who_waited_long_enough_is_refused_and_the_next_one_is_first() -> None:
    async def run() -> float:
        pool = Pool()
        large = asyncio.create_task(pool.ask("large", 8))
        await asyncio.sleep(ROOM_S / 2)
        small = asyncio.create_task(pool.ask("small", 1))
        pool.free = 1
        with pytest.raises(Overloaded):
            await large
        await small
        return pool.got["small"]

    assert simulated(run) <= ROOM_S + LOOK_S


def test_one_that_is_not_wanted_any_more_leaves_the_line() -> None:
    async def run() -> float:
        pool = Pool()
        gone, small = asyncio.create_task(pool.ask("gone", 8)), asyncio.create_task(pool.ask("small", 1))
        await asyncio.sleep(LOOK_S)
        pool.free = 1
        gone.cancel()
        await small
        return pool.got["small"]

    assert simulated(run) <= 2 * LOOK_S
