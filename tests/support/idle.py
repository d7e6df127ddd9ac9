"""Nothing leaked: every service's card shows its idle level."""

from __future__ import annotations

from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline

SERVICES = ("router", "param_server", "prefill", "decode", "cache", "invalidator")


async def until_idle(nats_url: str, within_s: float) -> None:
    """Waits until all six kinds are live and hold nothing for any request. Raises with the cards where that fails."""
    async with connect(nats_url, name="test") as bus, Fleet(bus) as fleet:
        try:
            await fleet.wait_for(_idle, Deadline.after(within_s))
        except Exception as error:
            cards = [card for service in SERVICES for card in fleet.live(service)]
            raise AssertionError("not idle: " + "; ".join(f"{c.id} {c.state} {c.load}" for c in cards)) from error


def _idle(fleet: Fleet) -> bool:
    cards = [card for service in SERVICES for card in fleet.live(service)]
    return {card.service for card in cards} == set(SERVICES) and all(
        (load.running, load.waiting, load.pages_used, load.leases, load.streams) == (0, 0, 0, 0, 0)
        for load in (card.load for card in cards)
    )
