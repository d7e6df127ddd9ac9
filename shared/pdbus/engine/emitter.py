"""Sends token items to routers: what piles up in one turn of the event loop leaves as one frame for each router."""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType

from pdbus.bus.bus import Bus
from pdbus.engine.outbox import Outbox
from pdbus.errors import PdbusError
from pdbus.messages.router import TokenItem
from pdbus.subjects import TOKENS
from pdbus.tasks import OwnTask

log = logging.getLogger(__name__)


class Emitter(OwnTask):
    """Sends while entered; leaving sends what is left."""

    def __init__(self, bus: Bus, worker: str) -> None:
        self.outbox = Outbox(worker, bus.incarnation)
        self._bus = bus
        self._unsent = asyncio.Event()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        await self._flush()

    def put(self, router: str, item: TokenItem) -> None:
        self.outbox.put(router, item, time.monotonic())
        self._unsent.set()

    async def _run(self) -> None:
        while True:
            await self._unsent.wait()
            self._unsent.clear()
            await self._flush()

    async def _flush(self) -> None:
        for router, frame in self.outbox.take():
            try:
                await self._bus.publish(TOKENS(router=router), frame)
            except PdbusError as error:
                log.warning("a token frame for %s was not sent, the router will ask for it: %s", router, error)
