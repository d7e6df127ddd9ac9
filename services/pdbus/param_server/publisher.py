"""Moves refs to the heads of their lines, once the fleet can serve those; has checkpoints written when one is due."""

from __future__ import annotations

import logging

from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.errors import PdbusError
from pdbus.messages.presence import Card
from pdbus.param_server.checkpoints import Checkpointer
from pdbus.param_server.commit import LogWriter, due_refs
from pdbus.param_server.watcher import Watcher
from pdbus.peers.history import HistoryFollower

log = logging.getLogger(__name__)

_APPEND_S = 10.0


class Publisher(Watcher):
    """Watches the fleet too. Several servers may: the log takes the move of one. Cards and entries wake it at once; its
    other looks catch what an append that failed has left."""

    def __init__(
        self, model: str, writer: LogWriter, follower: HistoryFollower, fleet: Fleet, checkpointer: Checkpointer
    ) -> None:
        super().__init__(follower)
        self._model = model
        self._checkpointer = checkpointer
        self._writer = writer
        self._fleet = fleet
        fleet.on_change(self._news.set)

    async def _act(self) -> None:
        try:
            await self._publish()
        except PdbusError as error:
            log.warning("the ref could not be moved: %s", error.message)
        try:
            await self._checkpointer.look()
        except PdbusError as error:
            log.warning("the checkpoint could not be written: %s", error.message)

    async def _publish(self) -> None:
        due = due_refs(self._follower.history, self._workers("prefill"), self._workers("decode"))
        for name, root in due.items():
            await self._writer.move_ref(name, root, Deadline.after(_APPEND_S))
            if self._follower.history.refs.get(name) == root:
                log.info("version %s is %s", root.hex()[:12], name)

    def _workers(self, service: str) -> list[Card]:
        return [card for card in self._fleet.live(service) if card.model == self._model]
