"""What follows the change log at a param-server goes on, whatever one of its turns met."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pdbus.param_server.watcher import Watcher
from pdbus.weights.history import History


class Follower:
    def __init__(self) -> None:
        self.callbacks: list[Callable[[History], object]] = []

    def on_change(self, callback: Callable[[History], object]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)


class Failing(Watcher):
    """Its first turns fail."""

    POLL_S = 0.001

    def __init__(self, follower: Any) -> None:
        super().__init__(follower)
        self.turns, self.idles = 0, 0
        self.over = asyncio.Event()

    async def _act(self) -> None:
        self.turns += 1
        if self.turns < 3:
            raise ValueError(self.turns)
        self.over.set()

    async def _idle(self) -> None:
        self.idles += 1
        raise ValueError("idle")


async def test_a_turn_that_fails_is_not_the_last() -> None:
    follower = Follower()
    async with Failing(follower) as watcher:
        await asyncio.wait_for(watcher.over.wait(), 60)
        assert watcher.idles >= 2
        assert len(follower.callbacks) == 1
    assert not follower.callbacks
