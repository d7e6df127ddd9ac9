"""Reservations that wait for pages, in order, as prompts that are read here wait in the scheduler's queue
(engine/scheduler.py): what is small or asks at the right moment does not get ahead of a large prompt for ever."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Awaitable, Callable

from pdbus.context import Deadline
from pdbus.errors import Overloaded
from pdbus.messages.decode import Reserve

ROOM_S = 2.0
"""So long one waits. Less than whoever asks waits for an answer; it asks again."""
_LOOK_S = 0.02
"""The first in line looks for room so often: pages are given back by whoever ends, in the engine's thread."""


class Room:
    """Of one decode worker, for its event loop."""

    def __init__(self) -> None:
        self._line: list[tuple[tuple[int, bool, int], asyncio.Event]] = []
        """Higher priorities first, of each interrupted answers, then as they came; the first one's event is set."""
        self._numbers = itertools.count()

    async def take(self, message: Reserve, deadline: Deadline, take: Callable[[], Awaitable[None]]) -> None:
        """Returns once it is the message's turn, and `take` has not raised Overloaded. Raises Overloaded where that
        isn't so in time, and whatever else `take` does."""
        own = (-message.priority, not message.interrupted, next(self._numbers)), asyncio.Event()
        bisect.insort(self._line, own)
        until = deadline.within(ROOM_S)
        try:
            while True:
                await self._first(own, until)
                try:
                    return await take()
                except Overloaded:
                    if until.passed:
                        raise
                await asyncio.sleep(_LOOK_S)
        finally:
            self._line.remove(own)
            if self._line:
                self._line[0][1].set()

    async def _first(self, own: tuple[tuple[int, bool, int], asyncio.Event], until: Deadline) -> None:
        try:
            while self._line[0] is not own:
                own[1].clear()
                async with until.timeout():
                    await own[1].wait()
        except TimeoutError:
            raise Overloaded("others wait for KV pages here", retry_after_s=0.5) from None
