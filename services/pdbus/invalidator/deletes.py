"""Carrying out: what the invalidator appends, enqueues, and asks of the cache nodes. All of it may be repeated."""

from __future__ import annotations

import asyncio
import logging
import time

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.context import RequestContext
from pdbus.errors import PdbusError
from pdbus.invalidator.deletions import NS
from pdbus.messages.cache import CacheDelete
from pdbus.messages.common import Digest
from pdbus.messages.invalidator import DueDelete
from pdbus.messages.workers import Invalidated
from pdbus.subjects import CACHE_DELETE, DELETES, INVALIDATED
from pdbus.telemetry.spans import meter

log = logging.getLogger(__name__)

_NODE_S = 2.0


class Deletes:
    """The effects on one model's caches. `longest_s`: when the second delete follows the first."""

    def __init__(self, bus: Bus, fleet: Fleet, model: str, longest_s: float) -> None:
        self._bus = bus
        self._fleet = fleet
        self._model = model
        self._longest_s = longest_s
        self._deleted = meter().create_counter("pdbus.invalidator.deleted", unit="{entry}")

    async def remind(self, reminder: DueDelete) -> None:
        """Enqueues a reminder; once, however many invalidators see the need. Raises PdbusError."""
        await self._bus.logs.enqueue(DELETES(model=self._model), reminder, message_id=self._id(reminder))

    async def carry_out(self, reminder: DueDelete) -> None:
        """Deletes on every node. After the first delete the second is durably reminded of before this returns.

        Raises PdbusError where it could not be made durable; a node that doesn't answer follows the log anyway."""
        entry = Invalidated(self._model, "delete", root=reminder.root, second=reminder.second, cause=reminder.cause)
        await self._bus.logs.append(INVALIDATED(), entry, message_id=self._id(reminder))
        deleted = await self._delete_on_nodes(reminder.root)
        step = "second" if reminder.second else "first"
        self._deleted.add(deleted, {"pdbus.step": step})
        log.info("%s delete of root %s: %d entries", step, reminder.root.hex()[:12], deleted)
        if not reminder.second:
            due_ns = time.time_ns() + int(self._longest_s * NS)
            await self.remind(DueDelete(self._model, reminder.root, due_ns, second=True, cause=reminder.cause))

    async def restore(self, root: Digest, undone_seq: int) -> None:
        """Lets a root that is live again be filled again, undoing the delete of that sequence. Raises PdbusError."""
        log.info("root %s is live again", root.hex()[:12])
        entry = Invalidated(self._model, "restore", root=root, cause=undone_seq)
        await self._bus.logs.append(INVALIDATED(), entry, message_id=f"restore-{root.hex()}-{undone_seq}")

    async def _delete_on_nodes(self, root: Digest) -> int:
        nodes = [card.id for card in self._fleet.live("cache")]
        return sum(await asyncio.gather(*(self._delete_on(node, root) for node in nodes)))

    async def _delete_on(self, node: str, root: Digest) -> int:
        try:
            reply = await self._bus.call(CACHE_DELETE(node=node), CacheDelete(root=root), RequestContext.after(_NODE_S))
        except PdbusError as error:
            log.warning("cache node %s did not confirm a delete, and will read it in the log: %s", node, error.message)
            return 0
        return reply.deleted

    def _id(self, reminder: DueDelete) -> str:
        return f"delete-{self._model}-{reminder.root.hex()}-{reminder.cause}-{2 if reminder.second else 1}"
