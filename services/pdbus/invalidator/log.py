"""Follows the log of invalidations into Deletions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pdbus.bus.bus import Bus
from pdbus.context import Deadline
from pdbus.errors import Corrupt, DeadlineExceeded, PdbusError
from pdbus.invalidator.deletions import Deletions
from pdbus.subjects import INVALIDATED
from pdbus.tasks import OwnTask

log = logging.getLogger(__name__)

_RETRY_S = 0.5


class DeletionsFollower(OwnTask):
    """Keeps `deletions` up to date while its scope lasts; calls `on_change` after each entry."""

    def __init__(self, bus: Bus, model: str, on_change: Callable[[], None]) -> None:
        self.deletions = Deletions(model)
        self._bus = bus
        self._on_change = on_change
        self._seq = 0
        self._read = asyncio.Event()

    async def caught_up(self, deadline: Deadline) -> None:
        """Returns once everything is known that the log held at the time of the call. Raises PdbusError."""
        last = await self._bus.logs.last_seq(INVALIDATED())
        try:
            async with deadline.timeout():
                while self._seq < last:
                    await self._read.wait()
        except TimeoutError:
            raise DeadlineExceeded("the log of invalidations could not be read to its end in time") from None

    async def _run(self) -> None:
        while True:
            try:
                async with self._bus.logs.follow(INVALIDATED(), after=self._seq) as follower:
                    async for record in follower:
                        self.deletions.apply(record.seq, record.time_ns, record.entry)
                        self._advance(record.seq)
            except Corrupt as error:
                log.error("the log of invalidations begins anew: %s", error.message)
                self.deletions = Deletions(self.deletions.model)
                self._advance(0)
            except PdbusError as error:
                log.warning("the log of invalidations can't be read, trying again: %s", error.message)
            await asyncio.sleep(_RETRY_S)

    def _advance(self, seq: int) -> None:
        self._seq = seq
        self._read.set()
        self._read = asyncio.Event()
        self._on_change()
