"""Nothing leaked: every process tells that it holds nothing for any request."""

from __future__ import annotations

from loadtest.chaos.leaks import at_rest
from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline

SERVICES = ("router", "param_server", "prefill", "decode", "cache", "invalidator")


async def until_idle(nats_url: str, within_s: float) -> None:
    """Waits until all kinds are live and each process has held nothing at some moment. Raises with what is held."""
    deadline = Deadline.after(within_s)
    async with connect(nats_url, name="test") as bus, Fleet(bus) as fleet:
        try:
            await fleet.wait_for(lambda f: all(map(f.live, SERVICES)), deadline)
        except Exception as error:
            raise AssertionError(f"not all of {SERVICES} are live") from error
        found, busy = await at_rest(bus, fleet, deadline.remaining_s)
        assert not busy, f"not idle: {busy}"
        assert {card.id for service in SERVICES for card in fleet.live(service)} <= found.keys()
