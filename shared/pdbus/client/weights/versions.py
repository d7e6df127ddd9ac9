"""The versions of one model: which there are, what they consist of, how they differ, and where they come from."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack

from pdbus.bus.bus import Bus
from pdbus.bus.fleet_table import DEAD_AFTER_S
from pdbus.bus.presence import Fleet
from pdbus.client.weights.diff import TensorDiff, tensor_diffs
from pdbus.client.weights.lineage import FINGERPRINT, Lineage, find_lineage, lineage_of
from pdbus.context import Deadline, RequestContext, new_id
from pdbus.errors import Conflict, DeadlineExceeded, NotFound, Unavailable
from pdbus.messages.changelog import LogEntry
from pdbus.messages.common import Digest
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.subjects import CHANGELOG
from pdbus.weights.history import History
from pdbus.weights.log_state import Version
from pdbus.weights.manifest import Manifest

LOG_S = 10.0


class Versions:
    """Follows the model's change log from its first use on; `close` ends that."""

    def __init__(self, bus: Bus, model: str) -> None:
        self._bus, self._model = bus, model
        self._follower = HistoryFollower(bus, model)
        self._fleet = Fleet(bus)
        self._reader = BlockReader(bus, model, self._follower)
        self._life = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._started = False

    async def close(self) -> None:
        await self._life.aclose()

    async def history(self) -> History:
        """The log, folded, as it is now."""
        await self._ready()
        await self._follower.caught_up(Deadline.after(LOG_S))
        return self._follower.history

    async def resolve(self, name: str) -> Version:
        """The version that a ref, a root or its first digits name. Raises NotFound, InvalidRequest."""
        history = await self.history()
        return history.roots[history.resolve(name)]

    async def manifest(self, root: Digest) -> Manifest:
        await self._ready()
        return await self._reader.manifest(root, RequestContext.after(LOG_S))

    async def diff(self, old: str, new: str) -> tuple[TensorDiff, ...]:
        """The tensors that differ between two versions, in the order of layers. Raises as `resolve`."""
        before, after = [await self.manifest((await self.resolve(name)).root) for name in (old, new)]
        return tensor_diffs(before, after)

    async def lineage(self, name: str) -> Lineage:
        """Where the version comes from that a ref, a root, its first digits, or an answer's `system_fingerprint` names;
        whether it is served, was rolled back, is no longer kept, or was given up. What this client no longer knows of,
        the log tells; that takes a second for a thousand entries. Raises NotFound, InvalidRequest, DeadlineExceeded."""
        name = name.removeprefix(FINGERPRINT)
        history = await self.history()
        try:
            version = history.roots[history.resolve(name)]
        except NotFound:
            return await find_lineage(self._bus.logs, CHANGELOG(model=self._model), name, history.seq)
        return await lineage_of(self._bus.logs, CHANGELOG(model=self._model), version, history)

    async def _append(self, entry: LogEntry) -> None:
        deadline = Deadline.after(LOG_S)
        to, expected, message_id = CHANGELOG(model=self._model), self._follower.seq, new_id()
        try:
            await self._bus.logs.append(to, entry, expected_seq=expected, message_id=message_id, deadline=deadline)
        except Conflict:
            raise Conflict("the change log moved at the same time: look at it, and try again") from None
        await self._follower.caught_up(deadline)

    async def _ready(self) -> None:
        async with self._starting:
            if self._started:
                return
            async with AsyncExitStack() as life:
                await self._bus.logs.ensure()
                await life.enter_async_context(self._follower)
                await life.enter_async_context(self._fleet)
                await self._follower.caught_up(Deadline.after(LOG_S))
                if not self._follower.history.seq:
                    raise Unavailable(f"there is no model {self._model} on this bus")
                await self._hear_of_all()
                self._life = life.pop_all()
            self._started = True

    async def _hear_of_all(self) -> None:
        """Returns once each member has been heard of, or must be taken for dead: updates go to those that live."""
        members = set(self._follower.history.members)

        def heard(fleet: Fleet) -> bool:
            return members <= {card.id for card in fleet.live("param_server")}

        with contextlib.suppress(DeadlineExceeded, TimeoutError):
            await self._fleet.wait_for(heard, Deadline.after(DEAD_AFTER_S))
