"""Goal 1: what commits cost those who are being served. The same load with commits beside it and without, in turn."""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import mean

from loadtest.asking import Failed
from loadtest.goals import Row, at_least, none_of
from loadtest.goals import beside as no_goal
from loadtest.prompts import Prompts
from loadtest.report import percentile
from loadtest.weights.changes import Change, Changes
from loadtest.weights.commits import Told, beside, settled
from loadtest.weights.load import NEW_TOKENS, PROMPT_TOKENS, Asked, Loader, Run
from loadtest.weights.oracle import oracle
from loadtest.weights.terms import Subject, Terms, subject

STREAMS = 16
"""Answers at once that saturate the stack."""
OFTEN_S, SELDOM_S = 60.0 / 50, 60.0 / 10
"""Between commits: 50, and 10, in a minute."""
_SHARE = 0.05
_CHECKED_OF_EACH = 6


@dataclass
class Pairs:
    """Runs in turn: without commits, with them."""

    off: list[Run] = field(default_factory=list)
    on: list[Run] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)

    @property
    def kept(self) -> float:
        """The part of the throughput that is left with commits; NaN where there was none without them."""
        off, on = (mean(run.tokens_per_s for run in runs) for runs in (self.off, self.on))
        return on / off if off else math.nan

    @property
    def asked(self) -> list[Asked]:
        return [one for run in (*self.off, *self.on) for one in run.asked]

    @property
    def failed(self) -> list[str]:
        return [reason for run in (*self.off, *self.on) for reason in run.failed]

    def made(self) -> str:
        count, due = sum(len(one.committed) for one in self.told), sum(one.due for one in self.told)
        waits = [wait for one in self.told for wait in one.waits_s]
        return (
            f"{count} of {due} commits made in time, {len(waits)} became the ref, commit to ref p50 "
            f"{percentile(waits, 50):.2f} s p99 {percentile(waits, 99):.2f} s"
        )


async def measure(terms: Terms) -> list[Row]:
    seconds = 12.0 if terms.short else 60.0
    turns = 1 if terms.short else 2
    changes, loader = Changes(terms.model), Loader(Prompts.of(terms.model))
    async with subject(terms) as on:
        await loader.closed(on, STREAMS, 3.0)  # what a first request of each shape warms up
        capacity = (await loader.closed(on, STREAMS, seconds / 3)).requests_per_s
        if not capacity:
            raise Failed(f"the stack answered nothing in {seconds / 3:g} s")
        rate = capacity / 2
        _tell(f"capacity {capacity:.2f} requests/s of {PROMPT_TOKENS} + {NEW_TOKENS} tokens")

        async def half(turn: int) -> Run:
            return await loader.open(on, rate, seconds, turn)

        async def full(turn: int) -> Run:
            return await loader.closed(on, STREAMS, seconds)

        layers = await _pairs(on, half, changes.two_layers, OFTEN_S, turns)
        scattered = await _pairs(on, half, lambda: changes.scattered(_SHARE), OFTEN_S, 1)
        saturated = await _pairs(on, full, changes.two_layers, SELDOM_S, turns)
        async with oracle(on.stack) as fresh:
            everything = [*layers.asked, *scattered.asked, *saturated.asked]
            checked = await fresh.check(everything, terms.verify, _CHECKED_OF_EACH)
    failed = [*layers.failed, *scattered.failed, *saturated.failed]
    load = f"open loop at {rate:.2f} of {capacity:.2f} requests/s, {seconds:g} s x {turns}"
    kept = "tokens/s against the same arrivals without commits, in turn"
    return [
        none_of("failed requests", len(failed), len(everything), f"all loads of this section: {failed[:2] or 'none'}"),
        at_least("throughput, 50 commits a minute of 2 layers", layers.kept, 0.95, f"{load}; {kept}; {layers.made()}"),
        no_goal(
            "throughput, 50 commits a minute of 5 % of all blocks",
            f"{scattered.kept:.1%}",
            f"{kept}, {seconds:g} s; {scattered.made()}",
            value=scattered.kept,
        ),
        at_least(
            "throughput at saturation, 10 commits a minute",
            saturated.kept,
            0.90,
            f"{STREAMS} streams, {seconds:g} s x {turns}; {saturated.made()}",
        ),
        none_of(
            "answers that differ from a fresh engine's on their root",
            len(checked.wrong),
            checked.answers,
            f"{checked.roots} of {len({one.seen.fingerprint for one in everything})} versions that answered",
        ),
    ]


async def _pairs(
    on: Subject, load: Callable[[int], Awaitable[Run]], make: Callable[[], Change], every_s: float, turns: int
) -> Pairs:
    """Who goes first changes from turn to turn."""
    found = Pairs()

    async def without(turn: int) -> None:
        found.off.append(await load(turn))

    async def with_commits(turn: int) -> None:
        async with beside(on.client.weights, make, every_s) as told:
            found.on.append(await load(turn))
        await settled(on.client.weights)
        found.told.append(told)

    for turn in range(turns):
        for run in (without, with_commits) if turn % 2 == 0 else (with_commits, without):
            await run(turn)
        off, with_ = found.off[-1], found.on[-1]
        _tell(f"tokens/s {off.tokens_per_s:.1f} without, {with_.tokens_per_s:.1f} with; {found.made()}")
    return found


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
