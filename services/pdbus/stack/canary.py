"""`pdbus weights canary` without a version: what the requests of each ref met, side by side."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Column, Table

from pdbus.bus.bus import Bus
from pdbus.bus.presence import INTERVAL_S, Fleet
from pdbus.context import Deadline, RequestContext
from pdbus.errors import PdbusError
from pdbus.messages.common import Digest
from pdbus.messages.router import RefFigures, RefStatsWanted
from pdbus.peers.history import HistoryFollower
from pdbus.stack.attach import Target, attached
from pdbus.stack.view import wide_console
from pdbus.stack.weights_log import short
from pdbus.subjects import REF_STATS

_LISTEN_S = 2.5 * INTERVAL_S
_LOG_S = _ANSWER_S = 5.0


@dataclass
class Side:
    """One ref, over all routers, since it names its present version."""

    root: Digest
    requests: int = 0
    errors: int = 0
    first_token_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)


def compare(target: Target) -> int:
    """Prints the table."""
    sides, shares = asyncio.run(_look(target))
    titles = ("ref", "version", "share", "requests", "errors", "TTFT p50", "p99", "ITL p50", "p99")
    table = Table(*(Column(title, no_wrap=True) for title in titles), box=None)
    for ref, side in sides.items():
        share = f"{shares[ref]:.0%}" if ref in shares else ""
        latencies = (*_percentiles(side.first_token_s), *_percentiles(side.per_token_s))
        table.add_row(ref, short(side.root), share, str(side.requests), _rate(side), *latencies)
    wide_console().print(table)
    return 0


def merged(refs: Mapping[str, Digest], told: Iterable[RefFigures]) -> dict[str, Side]:
    """By ref, `stable` first: what routers tell of the versions that the refs name now."""
    names = sorted(refs, key=lambda name: (name != "stable", name))
    sides = {name: Side(refs[name]) for name in names}
    for figures in told:
        side = sides.get(figures.ref)
        if side is None or side.root != figures.root:
            continue
        side.requests += figures.requests
        side.errors += figures.errors
        side.first_token_s += figures.first_token_s
        side.per_token_s += figures.per_token_s
    return sides


async def _look(target: Target) -> tuple[dict[str, Side], dict[str, float]]:
    async with attached(target) as bus, Fleet(bus) as fleet, HistoryFollower(bus, target.model) as follower:
        await asyncio.gather(asyncio.sleep(_LISTEN_S), follower.caught_up(Deadline.after(_LOG_S)))
        routers = [card.id for card in fleet.live("router") if card.model == target.model]
        told = await asyncio.gather(*(_figures(bus, router) for router in routers))
        history = follower.history
        return merged(history.refs, (figures for each in told for figures in each)), history.shares


async def _figures(bus: Bus, router: str) -> Sequence[RefFigures]:
    try:
        return (await bus.call(REF_STATS(router=router), RefStatsWanted(), RequestContext.after(_ANSWER_S))).refs
    except PdbusError as error:
        wide_console().print(f"router {router} did not tell: {error.message}")
        return ()


def _rate(side: Side) -> str:
    return f"{side.errors} ({side.errors / side.requests:.1%})" if side.requests else "0"


def _percentiles(seconds: Sequence[float]) -> tuple[str, str]:
    if not seconds:
        return "", ""
    cut = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    return f"{1e3 * cut[49]:.0f} ms", f"{1e3 * cut[98]:.0f} ms"
