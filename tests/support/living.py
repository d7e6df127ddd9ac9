"""A service in the test's own process, present on the bus as the runtime would make it, and ready."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pdbus.bus.presence import Presence
from pdbus.messages.presence import Card
from pdbus.runtime import Service
from tests.support.until import until

T = TypeVar("T", bound=Service[Any])


@asynccontextmanager
async def living(service: T) -> AsyncIterator[T]:
    bus, settings = service.bus, service.settings

    def card(seq: int) -> Card:
        plain = Card(service.name, settings.id, bus.incarnation, seq, "ready", settings.model, load=service.load())
        return service.card(plain)

    async with service, Presence(bus, card, service.changed) as presence:
        await until(lambda: card(0).state == "ready")
        await presence.announce()
        yield service
