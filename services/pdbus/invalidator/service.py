"""The invalidator: deletes what a model's dead roots left in the caches, twice, and lets live ones back in.

Three sources, one truth. The change log says which roots are live; the log of invalidations says what was deleted; the
work queue holds a reminder for each delete that is to come, so that none is lost while no invalidator runs. It also
looks at samples of what the caches hold, whether it may still be there (audit.py). Several
invalidators of a model share the queue; what they append or enqueue twice counts once, by its message id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import ClassVar, Self

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.bus.work import Job
from pdbus.context import Deadline
from pdbus.errors import PdbusError
from pdbus.invalidator.audit import Audit
from pdbus.invalidator.deletes import Deletes
from pdbus.invalidator.deletions import NS
from pdbus.invalidator.log import DeletionsFollower
from pdbus.invalidator.settings import InvalidatorSettings
from pdbus.messages.invalidator import DueDelete
from pdbus.messages.presence import Card, Load
from pdbus.peers.history import HistoryFollower
from pdbus.runtime import Service
from pdbus.subjects import DELETES
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_CONFIRM_S = 5.0
_LONGEST_PAUSE_S = 3600.0


class InvalidatorService(Service[InvalidatorSettings]):
    """May be stopped or killed at any moment: whatever it was at comes again, here or at another invalidator."""

    name: ClassVar[str] = "invalidator"

    def __init__(self, settings: InvalidatorSettings, bus: Bus) -> None:
        super().__init__(settings, bus)
        self._news = asyncio.Event()
        self._history = HistoryFollower(bus, settings.model)
        self._log = DeletionsFollower(bus, settings.model, self._news.set)
        self._fleet = Fleet(bus)
        self._deletes = Deletes(bus, self._fleet, settings.model, settings.longest_deadline_s)
        self._audit = Audit(bus, self._fleet, self._history, self._log, settings.model, settings.audit_per_s)
        self._reminded: set[DueDelete] = set()
        self._working = False
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self.bus.logs.ensure()
            await stack.enter_async_context(self._fleet)
            await stack.enter_async_context(self._log)
            await stack.enter_async_context(self._history)
            self._history.on_change(lambda _: self._news.set())
            for loop in (self._reconcile, self._work, self._audit.run):
                stack.push_async_callback(cancelled, asyncio.create_task(_always(loop)))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def load(self) -> Load:
        return Load(running=int(self._working), waiting=len(self._reminded))

    def held(self) -> dict[str, int]:
        return {"deleting": int(self._working)}

    def kept(self) -> dict[str, int]:
        return {"deletes_to_come": len(self._reminded)}

    def card(self, card: Card) -> Card:
        return replace(card, detail=self._audit.told)

    async def _reconcile(self) -> None:
        """After each change of either log: a reminder for each delete to come, a restore for each root that is live."""
        while True:
            self._news.clear()
            await self._know()
            history, deletions = self._history.history, self._log.deletions
            for root, seq in list(deletions.wrongly_buried(history)):
                await self._deletes.restore(root, seq)
            window_s, longest_s = self.settings.rollback_window_s, self.settings.longest_deadline_s
            pending = deletions.pending(history, window_s, longest_s, time.time_ns())
            self._reminded.intersection_update(pending)
            for reminder in pending:
                if reminder not in self._reminded:
                    await self._deletes.remind(reminder)
                    self._reminded.add(reminder)
            await self._news.wait()

    async def _work(self) -> None:
        async with contextlib.aclosing(self.bus.logs.work(DELETES(model=self.settings.model))) as jobs:
            async for job in jobs:
                self._working = True
                try:
                    await self._settle(job)
                except PdbusError as error:
                    log.warning("a delete is put off: %s", error.message)
                    await job.later(_RETRY_S)
                finally:
                    self._working = False

    async def _settle(self, job: Job[DueDelete]) -> None:
        """Settled as done only when the delete, and after a first one the reminder of the second, is durable."""
        wait_s = (job.message.due_ns - time.time_ns()) / NS
        if wait_s > 0:
            await job.later(min(wait_s, _LONGEST_PAUSE_S))
            return
        await self._know()
        if self._log.deletions.still_wanted(job.message, self._history.history):
            await self._deletes.carry_out(job.message)
        await job.done()

    async def _know(self) -> None:
        """Returns once both logs are known as far as they go now. Raises PdbusError."""
        deadline = Deadline.after(_CONFIRM_S)
        await self._history.caught_up(deadline)
        await self._log.caught_up(deadline)


async def _always(loop: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await loop()
        except PdbusError as error:
            log.warning("trying again: %s", error.message)
        except Exception:
            log.exception("failed, trying again")
        await asyncio.sleep(_RETRY_S)
