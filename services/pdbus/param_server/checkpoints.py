"""Writes down where the change log stands, every so many entries, so that whoever joins late need not read it all."""

from __future__ import annotations

import logging

from pdbus.bus.bus import Bus
from pdbus.context import Deadline
from pdbus.errors import Conflict, TooLarge
from pdbus.peers.history import HistoryFollower
from pdbus.subjects import CHECKPOINTS
from pdbus.weights.checkpointing import EVERY, checkpoint_of, is_due

log = logging.getLogger(__name__)

_APPEND_S = 10.0


class Checkpointer:
    """Every param-server has one: an append that compares with the last checkpoint lets one of them through."""

    def __init__(self, bus: Bus, model: str, follower: HistoryFollower) -> None:
        self._bus, self._follower = bus, follower
        self._to = CHECKPOINTS(model=model)
        self._next = 0
        """Entries at which it looks again; before that nothing can be due."""

    async def look(self) -> None:
        """Writes a checkpoint if one is due. Raises PdbusError where that could not be found out, or done."""
        if not self._follower.born or self._follower.history.entries < max(self._next, EVERY):
            return
        last = await self._bus.logs.last(self._to)
        history, born = self._follower.history, self._follower.born  # together: of one and the same log
        if born and is_due(history, last.entry if last else None, born):
            try:
                await self._append(last.seq if last else 0)
            except Conflict:
                log.debug("another server has written the checkpoint")
        elif last and last.entry.log == born:
            self._next = last.entry.entries + EVERY

    async def _append(self, expected_seq: int) -> None:
        history, born, deadline = self._follower.history, self._follower.born, Deadline.after(_APPEND_S)
        full, brief = checkpoint_of(history, born), checkpoint_of(history, born, commits=0)
        try:
            await self._bus.logs.append(self._to, full, expected_seq=expected_seq, deadline=deadline)
        except TooLarge:  # many layers, or many versions at a time: lineage is read in the log then
            await self._bus.logs.append(self._to, brief, expected_seq=expected_seq, deadline=deadline)
        self._next = full.entries + EVERY
        log.info("checkpoint after entry %d: %d versions", full.seq, len(full.versions))
