"""What processes hold when nothing is asked of them, before a load and after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.messages.debug import Holdings
from pdbus.stack.status import holdings

_SLACK = {"tasks": 12, "threads": 6, "files": 12}
"""More than there were before the load, at most: connections of clients that still stand, and the like."""
_MEMORY, _MEMORY_BYTES = 1.5, 96 << 20
"""Caches and tables fill under load: at most so many times as much, and so much more."""
_LOOK_S = 0.25


async def at_rest(bus: Bus, fleet: Fleet, within_s: float) -> tuple[dict[str, Holdings], dict[str, dict[str, int]]]:
    """By id: what each process kept at a moment at which it held nothing; and what those hold that never did."""
    found: dict[str, Holdings] = {}
    busy: dict[str, dict[str, int]] = {}
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        cards = fleet.cards()  # also of those that are silent just now: who is busy may be
        for told in await holdings(bus, [card for card in cards if card.id not in found]):
            busy[told.id] = told.leaked
            if not told.leaked:
                found[told.id] = told
        if cards and all(card.id in found for card in cards):
            return found, {}
        await asyncio.sleep(_LOOK_S)
    return found, {id: held for id, held in busy.items() if held}


def grown(before: Mapping[str, Holdings], after: Mapping[str, Holdings]) -> list[str]:
    """What processes keep more of than any of their kind did, beyond what a load explains."""
    told = []
    for id, now in sorted(after.items()):
        kin = [one for one in before.values() if one.service == now.service]
        for name in (*_SLACK, "rss_bytes"):
            most = max((one.kept.get(name, 0) for one in kin), default=0)
            bound = _MEMORY * most + _MEMORY_BYTES if name == "rss_bytes" else most + _SLACK[name]
            if now.kept.get(name, 0) > bound:
                told.append(f"{id} keeps {name} {now.kept[name]}, and {most} before")
    return told
