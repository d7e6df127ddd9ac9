"""Decode services of a tiny model in the test's process, on a real server, and a router that only asks and listens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet, Presence
from pdbus.context import Deadline
from pdbus.decode.service import DecodeService
from pdbus.decode.settings import DecodeSettings
from pdbus.messages.presence import Card, State
from pdbus.subjects import TOKENS
from tests.support.asking import Router
from tests.support.checkpoints import tiny_checkpoint
from tests.support.living import living
from tests.support.param_servers import ParamServers

SEEN_S = 60.0
"""Within which a test waits for what takes seconds: machines may be busy."""


@dataclass
class DecodeServices:
    services: list[DecodeService]
    fleet: Fleet
    router: Router
    """Asks the first one."""
    life: AsyncExitStack
    """Of the services."""

    async def says(self, service: DecodeService, state: State) -> Card:
        """Its first card, from now on, that says so."""
        id_ = service.settings.id

        def said(fleet: Fleet) -> bool:
            card = fleet.card(id_)
            return card is not None and card.state == state

        await self.fleet.wait_for(said, Deadline.after(SEEN_S))
        card = self.fleet.card(id_)
        assert card
        return card


@asynccontextmanager
async def decode_services(
    nats_url: str, name: str, folder: Path, count: int = 1, outlives: AsyncExitStack | None = None
) -> AsyncIterator[DecodeServices]:
    """Colocated ones, that read their prompts themselves. `outlives`: is closed once they are."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await ParamServers(nats_url, name, folder, stack).start("a", tiny_checkpoint(folder / "model", "llama"))
        bus = await enter(connect(nats_url, name=name))
        ids = [f"{name}-d{number}" for number in range(1, count + 1)]
        router = Router(bus, f"{name}-r", name, b"", "", ids[0])
        card = Card("router", router.id, bus.incarnation, 0, "ready", name)
        await enter(Presence(bus, lambda seq: replace(card, seq=seq)))
        await bus.subscribe(TOKENS(router=router.id), router.hear)
        fleet = await enter(Fleet(bus))
        buses = [await enter(connect(nats_url, name=id_)) for id_ in ids]
        if outlives is not None:
            await enter(outlives)
        life = await enter(AsyncExitStack())
        services = []
        for id_, own in zip(ids, buses, strict=True):
            common = {"id": id_, "model": name, "colocated": True, "engine": "torch", "threads": 1}
            settings = DecodeSettings(**common, kv_bytes=1 << 22, swap_bytes=0)  # type: ignore[arg-type]
            services.append(await life.enter_async_context(living(DecodeService(settings, own))))
        made = DecodeServices(services, fleet, router, life)
        for service in services:
            (router.root,) = (await made.says(service, "ready")).roots
            for other in (router.id, *ids):
                await service.fleet.wait_for(
                    lambda fleet, other=other: fleet.state(other) == "live",  # type: ignore[misc]
                    Deadline.after(SEEN_S),
                )
        yield made
