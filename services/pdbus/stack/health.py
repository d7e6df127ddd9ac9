"""`pdbus health`: whether a process is ready, by its presence card. For health checks of containers."""

from __future__ import annotations

import asyncio
import platform
import sys

from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.errors import DeadlineExceeded, PdbusError
from pdbus.messages.presence import Card
from pdbus.nats_access import NatsAccess

_WAIT_S = 3.0


async def is_ready(nats_url: str, access: NatsAccess, model: str, service: str, id: str | None) -> bool:
    """Whether a card of such a process says ready, or draining, within 3 s. `id` None: of any on this host."""

    def meant(card: Card) -> bool:
        chosen = card.id == id if id else card.host == platform.node()
        return (card.model, card.service) == (model, service) and chosen and card.state not in ("starting", "hung")

    try:
        async with connect(nats_url, name="pdbus health", wait_s=_WAIT_S, access=access) as bus, Fleet(bus) as fleet:
            await fleet.wait_for(lambda seen: any(map(meant, seen.cards())), Deadline.after(_WAIT_S))
    except DeadlineExceeded:
        sys.stderr.write(f"no {service} of {model} said to be ready for {_WAIT_S:.0f} s\n")
        return False
    except PdbusError as error:
        sys.stderr.write(f"{service} is not ready: {error.message}\n")
        return False
    return True


def health(nats_url: str, access: NatsAccess, model: str, service: str, id: str | None) -> int:
    return 0 if asyncio.run(is_ready(nats_url, access, model, service, id)) else 1
