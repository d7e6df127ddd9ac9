"""What the tasks of a param-server that follow the change log have in common."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import ClassVar

from pdbus.peers.history import HistoryFollower
from pdbus.tasks import OwnTask
from pdbus.weights.history import History

log = logging.getLogger(__name__)


class Watcher(OwnTask):
    """While the scope lasts, it acts: at once, after each log entry, whenever `_news` is set, and every `POLL_S`
    besides. What `_act` and `_idle` raise is logged: at the next turn it is tried again."""

    POLL_S: ClassVar[float] = 1.0

    def __init__(self, follower: HistoryFollower) -> None:
        self._follower = follower
        self._news = asyncio.Event()

    @abstractmethod
    async def _act(self) -> None: ...

    async def _idle(self) -> None:
        """Before a turn that comes without any news. Nothing, unless a watcher says otherwise."""

    def _on_change(self, history: History) -> None:
        self._news.set()

    async def _run(self) -> None:
        stop_listening = self._follower.on_change(self._on_change)
        try:
            while True:
                self._news.clear()
                await self._turn(self._act)
                try:
                    async with asyncio.timeout(self.POLL_S):
                        await self._news.wait()
                except TimeoutError:
                    await self._turn(self._idle)
        finally:
            stop_listening()

    async def _turn(self, what: Callable[[], Awaitable[None]]) -> None:
        try:
            await what()
        except Exception:
            log.exception("%s failed; it goes on", type(self).__name__)
