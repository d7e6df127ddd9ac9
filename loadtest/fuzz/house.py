"""All six services in this process, on a nats-server of their own, with a model that costs nothing to compute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.fuzz.seeds import write_folder
from pdbus.bus.bus import Bus, connect
from pdbus.bus.presence import Fleet, Presence
from pdbus.cache.service import CacheService
from pdbus.cache.settings import CacheSettings
from pdbus.context import Deadline
from pdbus.decode.service import DecodeService
from pdbus.decode.settings import DecodeSettings
from pdbus.invalidator.service import InvalidatorService
from pdbus.invalidator.settings import InvalidatorSettings
from pdbus.messages.presence import Card
from pdbus.param_server.service import ParamServerService
from pdbus.param_server.settings import ParamServerSettings
from pdbus.prefill.service import PrefillService
from pdbus.prefill.settings import PrefillSettings
from pdbus.router.service import RouterService
from pdbus.router.settings import RouterSettings
from pdbus.runtime.service import Service
from pdbus.stack.nats_server import embedded_nats

MODEL = "toy"
SERVICES = ("router", "param_server", "prefill", "decode", "cache", "invalidator")
_READY_S = 90.0
_IDLE_S = 60.0


@dataclass
class House:
    bus: Bus
    """Of a stranger."""
    fleet: Fleet
    services: tuple[Service[Any], ...]

    @property
    def cards(self) -> dict[str, Card]:
        """By service."""
        return {service: self.fleet.live(service)[0] for service in SERVICES}

    def check(self) -> None:
        """Raises what a service failed with."""
        for service in self.services:
            if service.failure:
                raise AssertionError(f"the {service.name} service failed") from service.failure

    async def until_idle(self) -> None:
        """Raises AssertionError with the loads where somebody goes on holding something."""
        try:
            async with asyncio.timeout(_IDLE_S):
                while held := [f"{s.name} {s.load()}" for s in self.services if _holds(s)]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"still held: {held}") from None


def _holds(service: Service[Any]) -> bool:
    load = service.load()
    return bool(load.running or load.waiting or load.pages_used or load.leases or load.streams)


def _services(folder: Path, checkpoint: Path, nats_url: str) -> list[tuple[type[Service[Any]], Any]]:
    common: dict[str, Any] = {"nats_url": nats_url, "model": MODEL}
    engine = common | {"engine": "torch", "precision": "fp32", "kv_dtype": "fp32", "kv_bytes": 8 << 20, "threads": 1}
    params: dict[str, Any] = {"data": folder / "params", "checkpoint": str(checkpoint)}
    disk: dict[str, Any] = {"data": folder / "cache"}
    swap: dict[str, Any] = {"data": folder / "decode", "swap_bytes": 1 << 20}
    return [
        (ParamServerService, ParamServerSettings(id="param-server-1", **params, **common)),
        (CacheService, CacheSettings(id="cache-1", cache_bytes=64 << 20, disk_bytes=16 << 20, **disk, **common)),
        (InvalidatorService, InvalidatorSettings(id="invalidator-1", **common)),
        (PrefillService, PrefillSettings(id="prefill-1", **engine)),
        (DecodeService, DecodeSettings(id="decode-1", **swap, **engine)),
        (RouterService, RouterSettings(id="router-1", http_port=0, **common)),
    ]


@asynccontextmanager
async def house(folder: Path) -> AsyncIterator[House]:
    checkpoint = write_folder(folder / "checkpoint")
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(embedded_nats(folder / "nats"))
        services = []
        for kind, settings in _services(folder, checkpoint, nats.url):
            bus = await stack.enter_async_context(connect(nats.url, name=settings.id))
            service = kind(settings, bus)
            services.append(service)
            await stack.enter_async_context(Presence(bus, _cards(service), service.changed))
            await stack.enter_async_context(service)
        stranger = await stack.enter_async_context(connect(nats.url, name="stranger"))
        fleet = await stack.enter_async_context(Fleet(stranger))

        def ready(known: Fleet) -> bool:
            return all(any(card.state == "ready" for card in known.live(service)) for service in SERVICES)

        await fleet.wait_for(ready, Deadline.after(_READY_S))
        yield House(stranger, fleet, tuple(services))


def _cards(service: Service[Any]) -> Any:
    settings, bus = service.settings, service.bus

    def card(seq: int) -> Card:
        own = Card(service.name, settings.id, bus.incarnation, seq, "ready", settings.model, load=service.load())
        return service.card(replace(own, bulk=bus.bulk.address))

    return card
