"""`pdbus status`: who lives, which versions exist and which names point where, what is held."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from pdbus.bus.bus import Bus
from pdbus.bus.presence import INTERVAL_S, Fleet
from pdbus.context import Deadline, RequestContext
from pdbus.messages.debug import Holdings, HoldingsWanted
from pdbus.messages.presence import Card
from pdbus.peers.history import HistoryFollower
from pdbus.stack.attach import Target, attached
from pdbus.stack.view import wide_console
from pdbus.subjects import DEBUG
from pdbus.weights.history import History

_ASK_S = 2.0
_LISTEN_S = 2.5 * INTERVAL_S
"""Long enough to hear every living process twice."""
_LOG_S = 10.0
_SHORT = 12
_STATE_COLOURS = {"ready": "green", "starting": "yellow", "draining": "magenta", "hung": "red"}


@dataclass(frozen=True)
class Status:
    model: str
    nats_url: str
    cards: tuple[Card, ...]
    """Of every living process, also of other models on the same bus, by service and id."""
    history: History


async def look(target: Target) -> Status:
    """Listens for a moment. Raises Unavailable without a NATS server, DeadlineExceeded when its log does not answer."""
    async with attached(target) as bus, Fleet(bus) as fleet, HistoryFollower(bus, target.model) as follower:
        await asyncio.gather(asyncio.sleep(_LISTEN_S), follower.caught_up(Deadline.after(_LOG_S)))
        living = [card for card in fleet.cards() if fleet.state(card.id) != "dead"]
        cards = tuple(sorted(living, key=lambda card: (card.service, card.id)))
        return Status(target.model, target.nats_url, cards, follower.history)


async def holdings(bus: Bus, cards: Iterable[Card]) -> list[Holdings]:
    """What each of these processes holds; one that does not tell is left out."""
    asked = (bus.call(DEBUG(service=c.service, id=c.id), HoldingsWanted(), RequestContext.after(_ASK_S)) for c in cards)
    told = await asyncio.gather(*asked, return_exceptions=True)
    return [one for one in told if isinstance(one, Holdings)]


async def _held(target: Target) -> list[Holdings]:
    async with attached(target) as bus, Fleet(bus) as fleet:
        await asyncio.sleep(_LISTEN_S)
        living = [card for card in fleet.cards() if fleet.state(card.id) != "dead"]
        return await holdings(bus, sorted(living, key=lambda card: (card.service, card.id)))


def show_holdings(all: Sequence[Holdings], console: Console) -> None:
    """What is held for work in hand, where it is not 0, and what is kept without any."""
    table = Table(*map(_whole, ("service", "id", "held")), "kept", box=None)
    for one in all:
        kept = " ".join(f"{name}={count}" for name, count in one.kept.items())
        held = " ".join(f"{name}={count}" for name, count in one.leaked.items())
        table.add_row(one.service, one.id, held or "nothing", kept)
    console.print(table if all else "no process is heard")


def as_json(status: Status) -> dict[str, Any]:
    """For programs; roots in hex."""
    return {
        "model": status.model,
        "nats_url": status.nats_url,
        "services": [{**asdict(card), "roots": [root.hex() for root in card.roots]} for card in status.cards],
        "refs": {name: root.hex() for name, root in sorted(status.history.refs.items())},
        "roots": [root.hex() for root in status.history.roots],
        "param_servers": list(status.history.members),
    }


def show(status: Status, console: Console) -> None:
    table = Table(*map(_whole, ("service", "id", "state", "roots", "running", "waiting", "pages")), "", box=None)
    for card in status.cards:
        load = card.load
        table.add_row(
            card.service,
            card.id,
            f"[{_STATE_COLOURS[card.state]}]{card.state}[/]",
            " ".join(root.hex()[:_SHORT] for root in card.roots),
            str(load.running),
            str(load.waiting),
            f"{load.pages_used}/{load.pages_total}" if load.pages_total else "",
            card.url or card.detail or card.compute_class,
        )
    console.print(table if status.cards else "no process is heard")
    versions = Table(*map(_whole, ("version", "refs", "precision", "author")), "message", box=None)
    for root, version in status.history.roots.items():
        names = [name for name, target in status.history.refs.items() if target == root]
        commit = version.commit
        versions.add_row(
            root.hex()[:_SHORT],
            " ".join(sorted(names)),
            *((commit.precision, commit.author, commit.message) if commit else ("", "", "")),
        )
    console.print(f"\n[bold]{status.model}[/] on {status.nats_url}", versions)


def _whole(title: str) -> Column:
    """A column whose cells are never broken."""
    return Column(title, no_wrap=True)


def status_holdings(target: Target, *, json_wanted: bool) -> int:
    found = asyncio.run(_held(target))
    if json_wanted:
        print(json.dumps([asdict(one) for one in found], indent=1))  # noqa: T201 - the command's output
    else:
        show_holdings(found, wide_console())
    return 0 if found else 1


def status(target: Target, *, json_wanted: bool) -> int:
    found = asyncio.run(look(target))
    if json_wanted:
        print(json.dumps(as_json(found), indent=1))  # noqa: T201 - the command's output
    else:
        show(found, wide_console())
    return 0 if found.cards else 1
