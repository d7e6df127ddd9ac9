"""The router as a process."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.messages.presence import Card, Load
from pdbus.peers.cache import CacheRing
from pdbus.peers.feature_entries import FeatureEntries
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.router.settings import RouterSettings
from pdbus.router.wiring import Router, router
from pdbus.runtime import Service

_RESULT_REPLICAS = 2


class RouterService(Service[RouterSettings]):
    """Answers HTTP from the start; its card says "ready" once it has been able to serve a request."""

    name = "router"

    def __init__(self, settings: RouterSettings, bus: Bus) -> None:
        super().__init__(settings, bus)
        self._stack = AsyncExitStack()
        self._router: Router | None = None
        self._ring: CacheRing | None = None
        self._was_ready = False

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            bus, settings = self.bus, self.settings
            fleet = await stack.enter_async_context(Fleet(bus))
            follower = await stack.enter_async_context(HistoryFollower(bus, settings.model))
            reader = BlockReader(bus, settings.model, follower)
            self._ring = await stack.enter_async_context(CacheRing(bus, fleet, replicas=_RESULT_REPLICAS))
            entries = FeatureEntries(await stack.enter_async_context(CacheRing(bus, fleet, replicas=1)))
            self._router = await stack.enter_async_context(
                router(settings, bus, fleet, follower, reader, self._ring, entries)
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def load(self) -> Load:
        if self._router is None:
            return Load()
        admission = self._router.frontend.admission
        return Load(running=admission.running, waiting=admission.waiting, leases=self._router.cancels.open)

    def held(self) -> dict[str, int]:
        if self._router is None or self._ring is None:
            return {}
        return self._router.held() | {"result_writes": self._ring.writing}

    def kept(self) -> dict[str, int]:
        return {"idempotency_keys": len(self._router.frontend.idempotency)} if self._router is not None else {}

    def card(self, card: Card) -> Card:
        if self._router is None:
            return replace(card, state="starting", detail="starting")
        reason = self._router.why_not_ready()
        self._was_ready |= not reason
        state = card.state if self._was_ready else "starting"
        return replace(
            card,
            state=state,
            detail=reason,
            url=self._router.http.url,
            roots=self._router.frontend.models.loaded,
        )

    async def stop_intake(self) -> None:
        if self._router is not None:
            await self._router.stop_intake()

    async def drain(self, deadline: Deadline) -> None:
        if self._router is not None and self._ring is not None:
            if self._router.jobs is not None:
                await self._router.jobs.drain(deadline)
            await self._router.frontend.admission.wait_idle()
            await self._ring.drain(deadline)
            await self._router.features.drain(deadline)
