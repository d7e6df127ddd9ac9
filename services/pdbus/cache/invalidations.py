"""Keeps a node's store in step with the log of invalidations, and says whether it is.

A node that restarts replays the log, so that roots stay buried which were before, and are deleted from its disk if they
are not yet. If entries of the log can't be had
any more (it was made anew, or lost some while the node was cut off), the node can't know what it missed: it forgets
everything and takes a new incarnation.
"""

from __future__ import annotations

import asyncio
import logging
import time

from pdbus.bus.bus import Bus
from pdbus.bus.follower import Follower
from pdbus.cache.logbook import Logbook, Place
from pdbus.caching.store import Store
from pdbus.context import new_id
from pdbus.errors import Corrupt, PdbusError, Unavailable
from pdbus.messages.workers import Invalidated
from pdbus.subjects import INVALIDATED
from pdbus.tasks import OwnTask
from pdbus.telemetry.spans import meter

log = logging.getLogger(__name__)

_RETRY_S = 0.5


class Invalidations(OwnTask):
    """Follows the log while its scope lasts. `lag_s`: how old the last confirmation of its end may be.

    `logbook`: of a node with a disk; the store is emptied unless the log has all since the place that it names."""

    def __init__(self, bus: Bus, store: Store, lag_s: float, logbook: Logbook | None = None) -> None:
        self.seq = 0
        """The last entry applied."""
        self._bus = bus
        self._store = store
        self._lag_s = lag_s
        self._logbook = logbook
        self._created = ""
        """The log's date of birth."""
        self._replayed_to = 0
        """Where the last life ended."""
        self._follower: Follower[Invalidated] | None = None
        self._deleted = meter().create_counter("pdbus.cache.invalidated", unit="{entry}")

    @property
    def age_s(self) -> float:
        """Seconds since it was last certain that the log holds nothing more; infinite before that."""
        return time.monotonic() - self._follower.confirmed_at if self._follower else float("inf")

    @property
    def caught_up(self) -> bool:
        return self.age_s <= self._lag_s

    def check(self) -> None:
        """Raises Unavailable unless the node knows of every invalidation up to a moment ago."""
        if not self.caught_up:
            raise Unavailable("this cache node has not caught up with the log of invalidations")

    def apply(self, seq: int, entry: Invalidated) -> None:
        """Applies one entry of the log. Where `seq` does not follow the last one's, entries were lost or unreadable."""
        if self.seq and seq != self.seq + 1:
            self._forget(f"invalidations {self.seq + 1} to {seq - 1} were lost")
        self.seq = seq
        match entry.action:
            case "delete":
                deleted = self._store.bury(entry.root, time.monotonic(), entry.second)
            case "restore":
                deleted = 0
                self._store.lift(entry.root)
            case "delete_name":
                deleted = self._store.delete_name(entry.name, entry.generation)
        if recorder := self._bus.recorder:
            generation = self._store.fences.generation
            recorder.put(entry.action, root=entry.root or None, name=entry.name or None, generation=generation, seq=seq)
        self._note()
        self._deleted.add(deleted, {"pdbus.action": entry.action})
        log.info("%s %s: %d entries deleted", entry.action, entry.name or entry.root.hex()[:12], deleted)

    async def _run(self) -> None:
        while True:
            try:
                await self._apply_all()
            except Corrupt as error:
                self._forget(error.message)
                self.seq = 0
            except PdbusError as error:
                log.warning("the log of invalidations can't be read, trying again: %s", error.message)
            self._follower = None
            await asyncio.sleep(_RETRY_S)

    async def _apply_all(self) -> None:
        if self._logbook and not self.seq:
            await self._compare(self._logbook)
        async with self._bus.logs.follow(INVALIDATED(), after=self.seq) as follower:
            self._follower = follower
            async for record in follower:
                self.apply(record.seq, record.entry)

    async def _compare(self, logbook: Logbook) -> None:
        """Gives the disk up if the log has not all that came since the disk was last in step with it."""
        state, place = await self._bus.logs.state(INVALIDATED()), logbook.read()
        if place is None:  # a first life
            self._store.clear(new_id())
        elif not place.follows_from(state):
            self._forget("the log of invalidations is another one, or has lost entries since the last life")
            place = None
        place = place or Place(state.created, 0)
        self._created, self._replayed_to = state.created, place.seq
        self._note()

    def _note(self) -> None:
        """Writes down how far the store is in step; a replay of older entries takes nothing back."""
        if self._logbook and self._created:
            try:
                self._logbook.write(Place(self._created, max(self.seq, self._replayed_to)))
            except OSError as error:
                log.warning("the logbook can't be written: a restart may give up the disk: %s", error)

    def _forget(self, why: str) -> None:
        log.warning("forgetting all entries: %s", why)
        if recorder := self._bus.recorder:
            recorder.put("forget_all")
        self._store.clear(new_id())
