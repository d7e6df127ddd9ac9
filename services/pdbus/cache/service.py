"""A cache node: a share of the ring's entries, served while it is in step with the log of invalidations."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, Self

from pdbus.bus.bus import Bus
from pdbus.bus.serving import Registration
from pdbus.cache.disk_tier import DiskTier
from pdbus.cache.handlers import Handlers
from pdbus.cache.invalidations import Invalidations
from pdbus.cache.logbook import Logbook
from pdbus.cache.settings import STORE_SHARE, CacheSettings
from pdbus.cache.transfers import Transfers
from pdbus.caching.disk import DiskStore
from pdbus.caching.disk_entry import RECORD_BYTES
from pdbus.caching.store import Store
from pdbus.context import Deadline
from pdbus.messages.presence import Card, Load
from pdbus.runtime import Service
from pdbus.subjects import CACHE_DELETE, CACHE_GET, CACHE_PUT, CACHE_SCAN
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)

_AT_ONCE = 1024
"""Requests at work: they hardly ever wait, and transfers have bounds of their own."""
_SWEEP_S = 5.0
_TRANSFER_SHARE = 0.1
"""Of the node's memory, for values on their way in each direction."""
_DISK_INDEX_SHARE = 0.05
"""Of the node's memory, for the index of its disk."""


class CacheService(Service[CacheSettings]):
    """Starts with an empty memory, and with what a former life left on its disk if it has one. Its card says "starting"
    until it has read the log of invalidations to its end, and again whenever it loses touch with it: then it answers
    `unavailable`, and rings leave it out."""

    name: ClassVar[str] = "cache"

    def __init__(self, settings: CacheSettings, bus: Bus) -> None:
        super().__init__(settings, bus)
        self.disk = _disk_tier(settings)
        self.store = Store(int(settings.cache_bytes * STORE_SHARE), bus.incarnation, self.disk)
        logbook = Logbook(settings.data / "kv" / "log.json") if self.disk and settings.data else None
        self.invalidations = Invalidations(bus, self.store, settings.cache_lag_s, logbook)
        self._transfers = Transfers(bus, int(settings.cache_bytes * _TRANSFER_SHARE))
        self._registrations: list[Registration[Any, Any]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self.bus.logs.ensure()
            if self.disk:
                await stack.enter_async_context(self.disk)
            stack.push_async_callback(self._transfers.close)
            await stack.enter_async_context(self.invalidations)
            await self._serve(stack)
            sweeper = asyncio.create_task(self._sweep())
            stack.push_async_callback(cancelled, sweeper)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def load(self) -> Load:
        return Load(
            running=sum(registration.running for registration in self._registrations),
            streams=len(self._transfers),
            bytes_used=self.store.used_bytes,
            bytes_total=self.store.budget_bytes,
        )

    def held(self) -> dict[str, int]:
        return {"transfers": len(self._transfers)}

    def kept(self) -> dict[str, int]:
        on_disk = {"disk_entries": len(self.disk.disk)} if self.disk else {}
        return {"entries": len(self.store), "bytes": self.store.used_bytes} | on_disk

    def card(self, card: Card) -> Card:
        if self.invalidations.caught_up:
            return card
        return replace(card, state="starting", detail="reading the log of invalidations")

    async def stop_intake(self) -> None:
        for registration in self._registrations:
            await registration.stop()

    async def drain(self, deadline: Deadline) -> None:
        for registration in self._registrations:
            await registration.drain(deadline)
        await self._transfers.drain(deadline)
        if self.disk:
            await self.disk.drain(deadline)

    async def _serve(self, stack: AsyncExitStack) -> None:
        node = self.settings.id
        handlers = Handlers(
            node, self.bus, self.store, self._transfers, self.settings.cache_ttl_s, self.invalidations.check, self.disk
        )
        self._registrations = [
            await self.bus.serve(CACHE_GET(node=node), handlers.get, limit=_AT_ONCE),
            await self.bus.serve(CACHE_PUT(node=node), handlers.put, limit=_AT_ONCE),
            await self.bus.serve(CACHE_DELETE(node=node), handlers.delete, limit=_AT_ONCE),
            await self.bus.serve(CACHE_SCAN(node=node), handlers.scan, limit=_AT_ONCE),
        ]
        for registration in self._registrations:
            stack.push_async_callback(registration.close)

    async def _sweep(self) -> None:
        """Frees what is over its time, so that the bytes that the card tells are of use to somebody."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.store.expire(time.monotonic())
            if self.disk:
                self.disk.expire(time.monotonic())


def _disk_tier(settings: CacheSettings) -> DiskTier | None:
    if settings.data is None or not settings.disk_bytes:
        return None
    most_entries = int(settings.cache_bytes * _DISK_INDEX_SHARE) // RECORD_BYTES
    wall_s = time.time() - time.monotonic()
    return DiskTier(DiskStore(settings.data / "kv", settings.disk_bytes, most_entries, wall_s))
