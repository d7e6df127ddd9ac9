"""Moves refs to the heads of their lines, once the fleet can serve those; has checkpoints written when one is due."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Self

from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.errors import PdbusError
from pdbus.messages.presence import Card
from pdbus.param_server.checkpoints import Checkpointer
from pdbus.param_server.commit import LogWriter, due_refs
from pdbus.peers.history import HistoryFollower
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)

_APPEND_S = 10.0
_POLL_S = 1.0
"""Cards and entries wake it at once; this catches what an append that failed has left."""


class Publisher:
    """While the scope lasts, watches the log and the fleet. Several servers may: the log takes the move of one."""

    def __init__(
        self, model: str, writer: LogWriter, follower: HistoryFollower, fleet: Fleet, checkpointer: Checkpointer
    ) -> None:
        self._model = model
        self._checkpointer = checkpointer
        self._writer = writer
        self._follower = follower
        self._fleet = fleet
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await cancelled(self._task)

    async def _run(self) -> None:
        news = asyncio.Event()
        self._fleet.on_change(news.set)
        stop_listening = self._follower.on_change(lambda _: news.set())
        try:
            while True:
                news.clear()
                try:
                    await self._publish()
                except PdbusError as error:
                    log.warning("the ref could not be moved: %s", error.message)
                try:
                    await self._checkpointer.look()
                except PdbusError as error:
                    log.warning("the checkpoint could not be written: %s", error.message)
                try:
                    async with asyncio.timeout(_POLL_S):
                        await news.wait()
                except TimeoutError:
                    pass
        finally:
            stop_listening()

    async def _publish(self) -> None:
        due = due_refs(self._follower.history, self._workers("prefill"), self._workers("decode"))
        for name, root in due.items():
            await self._writer.move_ref(name, root, Deadline.after(_APPEND_S))
            if self._follower.history.refs.get(name) == root:
                log.info("version %s is %s", root.hex()[:12], name)

    def _workers(self, service: str) -> list[Card]:
        return [card for card in self._fleet.live(service) if card.model == self._model]
