"""Nothing leaked: every process tells that it holds nothing for any request."""

from __future__ import annotations

import asyncio

from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.stack.status import holdings

SERVICES = ("router", "param_server", "prefill", "decode", "cache", "invalidator")


async def until_idle(nats_url: str, within_s: float, services: tuple[str, ...] = SERVICES) -> None:
    """Waits until all kinds are live and each process has held nothing at some moment. Raises with what is held."""
    busy: dict[str, dict[str, int]] = {}
    async with connect(nats_url, name="test") as bus, Fleet(bus) as fleet:
        try:
            async with asyncio.timeout(within_s):
                await fleet.wait_for(lambda f: all(map(f.live, services)), Deadline.after(within_s))
                busy = {card.id: {} for service in services for card in fleet.live(service)}
                while busy:
                    for told in await holdings(bus, [card for card in fleet.cards() if card.id in busy]):
                        busy[told.id] = told.leaked
                        if not told.leaked:
                            del busy[told.id]
                    await asyncio.sleep(0.05 if busy else 0.0)
        except Exception as error:
            raise AssertionError(f"not idle: {busy}") from error
