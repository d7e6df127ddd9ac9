"""A real router in this process, its HTTP socket included, with simulated workers on the in-memory bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from loadtest.simulated import SimulatedWorker
from loadtest.simulated_peers import Peers
from loadtest.simulated_version import SimulatedVersions, scope, version
from pdbus.bus.bus import Bus, connect, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.peers.cache import CacheRing
from pdbus.peers.feature_entries import FeatureEntries
from pdbus.router.settings import RouterSettings
from pdbus.router.wiring import Router, router

MODEL = "toy"
_READY_S = 30.0
_IDLE_S = 30.0


@dataclass
class Twin:
    bus: Bus
    """Of a caller."""
    router: Router
    workers: tuple[SimulatedWorker, ...]
    root: bytes

    @property
    def held(self) -> str:
        """What somebody still holds; empty: nothing."""
        own = self.router
        counts = {
            "running": own.frontend.admission.running,
            "listening": own.hub.listening_for,
            "cancels": own.cancels.open,
            "workers": sum(worker.held + worker.kept for worker in self.workers),
        }
        return ", ".join(f"{name} {count}" for name, count in counts.items() if count)

    async def until_idle(self) -> None:
        """Raises AssertionError where something stays held."""
        try:
            async with asyncio.timeout(_IDLE_S):
                while self.held:  # noqa: ASYNC110 - several parties bring it about, and none tells
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"still held: {self.held}") from None


@asynccontextmanager
async def twin(nats_url: str | None = None) -> AsyncIterator[Twin]:
    """`nats_url`: of a real server, so that there are jobs; None: the in-memory bus."""
    manifest = version()
    made, broker, peers = SimulatedVersions(manifest), MemoryBroker(), Peers()

    def connected() -> AbstractAsyncContextManager[Bus]:
        return memory_bus(broker) if nats_url is None else connect(nats_url, name="twin")

    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connected())
        caller = await stack.enter_async_context(connected())
        if nats_url is not None:
            await bus.logs.ensure()
        fleet = await stack.enter_async_context(Fleet(bus))
        workers = []
        for service in ("prefill", "decode"):
            own = await stack.enter_async_context(connected())
            scopes = {manifest.root: scope(manifest)}
            worker = SimulatedWorker(service, f"{service}-0", own, (manifest.root,), MODEL, peers, scopes)
            workers.append(await stack.enter_async_context(worker))
        await fleet.wait_for(lambda f: len(f.live("prefill")) + len(f.live("decode")) == 2, Deadline.after(_READY_S))
        settings = RouterSettings(id="router-0", model=MODEL, http_port=0)
        ring = await stack.enter_async_context(CacheRing(bus, fleet, replicas=1))
        entries = FeatureEntries(await stack.enter_async_context(CacheRing(bus, fleet, replicas=1)))
        serving = await stack.enter_async_context(router(settings, bus, fleet, made, made, ring, entries))
        await serving.frontend.models.get(manifest.root, Deadline.after(_READY_S))
        yield Twin(caller, serving, tuple(workers), manifest.root)
