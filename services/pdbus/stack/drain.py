"""`pdbus drain`: one process hands over what it is doing, or finishes it, and ends."""

from __future__ import annotations

import asyncio

from rich.console import Console

from pdbus.bus.bus import Bus
from pdbus.bus.presence import INTERVAL_S, Fleet
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, DeadlineExceeded, NotFound, Unavailable
from pdbus.messages.presence import Card
from pdbus.messages.workers import Drain, Draining
from pdbus.stack.attach import Target, attached
from pdbus.subjects import DRAIN

_FIND_S = 5.0
_ANSWER_S = 2.0
_LONGEST_S = 120.0
"""More than a process takes to drain and to close, unless it was told so (PDBUS_DRAIN_S)."""


def drain(target: Target, id: str, console: Console) -> int:
    """Returns the exit code: 0 once the process has ended. Raises NotFound, Unavailable, DeadlineExceeded."""
    moved = asyncio.run(_drain(target, id, console))
    console.print(f"{id} has ended; {moved} running answers moved to other workers")
    return 0


async def _drain(target: Target, id: str, console: Console) -> int:
    async with attached(target) as bus, Fleet(bus) as fleet:
        card = await _find(fleet, id)
        deadline, told, moved = Deadline.after(_LONGEST_S), "", 0
        while True:
            answer = await _ask(bus, card, deadline)
            if answer is None:
                return moved
            moved = answer.moved
            now = f"{id} drains: {answer.running} running, {answer.waiting} waiting, {answer.moved} moved"
            if now != told:
                console.print(now)
                told = now
            await asyncio.sleep(INTERVAL_S)


async def _find(fleet: Fleet, id: str) -> Card:
    try:
        await fleet.wait_for(lambda fleet: fleet.state(id) == "live", Deadline.after(_FIND_S))
    except DeadlineExceeded:
        raise NotFound(f"no process {id} is there; `pdbus status` has them all") from None
    card = fleet.card(id)
    assert card
    return card


async def _ask(bus: Bus, card: Card, deadline: Deadline) -> Draining | None:
    """None: it has ended, and may have been started again by whoever keeps it running."""
    deadline.check(f"{card.id} had ended")
    try:
        to = DRAIN(service=card.service, id=card.id)
        return await bus.call(to, Drain(card.incarnation), RequestContext(deadline.within(_ANSWER_S)))
    except (Unavailable, Conflict):
        return None
    except DeadlineExceeded:
        deadline.check(f"{card.id} had ended")
        return await _ask(bus, card, deadline)
