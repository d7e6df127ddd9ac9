"""Arguments, the run, and its report."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from loadtest.chaos.judging import OUTCOMES, REFUSED, RIGHT, Judgement, judge, longest_gap
from loadtest.chaos.run import Found, Wanted, chaos
from loadtest.chaos.strikes import Strike
from loadtest.markdown import markdown
from loadtest.report import percentile

_SHORT_MINUTES, _SHORT_EVERY_S = 3.0, 10.0
_TOLD = 12


def arguments(argv: list[str]) -> Wanted:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest chaos",
        description="Two of each service under mixed load, while one process after another, NATS among them, is "
        "killed, stopped, cut off or restarted. Every answer is held against that of an undisturbed run.",
    )
    parser.add_argument("--minutes", type=float, help="how long (default: 30, --short: 3)")
    parser.add_argument(
        "--every", type=float, metavar="S", help="seconds from strike to strike (default: 30, --short: 10)"
    )
    parser.add_argument("--short", action="store_true", help="3 minutes, a strike every 10 s")
    parser.add_argument("--callers", type=int, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of requests and strikes (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs there")
    given = parser.parse_args(argv)
    minutes = given.minutes or (_SHORT_MINUTES if given.short else Wanted.minutes)
    every_s = given.every or (_SHORT_EVERY_S if given.short else Wanted.every_s)
    if min(minutes, every_s, given.callers) <= 0:
        parser.error("everything must be positive")
    return Wanted(minutes, every_s, given.callers, given.seed, given.keep)


def main(argv: list[str]) -> int:
    wanted = arguments(argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(chaos(wanted, lambda line: print(line, file=sys.stderr, flush=True)))
    judged = judged_of(found)
    print(render(found, judged, wanted.seed))
    return 0 if sound(found, judged) else 1


def judged_of(found: Found) -> Judgement:
    return judge(found.judged, found.strikes, _names)


def sound(found: Found, judged: Judgement) -> bool:
    """Every goal is met."""
    back = all(strike.back_s is not None for strike in found.strikes)
    return judged.sound and back and not (found.held or found.grown or found.silent or found.exits or found.troubles)


def render(found: Found, judged: Judgement, seed: int) -> str:
    """For a person: outcomes in all and by strike, what leaked, and the evidence of whatever is wrong."""
    named: dict[str, list[Strike]] = {}
    for strike in found.strikes:
        for name in _names(strike):
            named.setdefault(name, []).append(strike)
    head = ["", "times", *OUTCOMES, "broken", "gap p50 (s)", "p99", "ready p50 (s)", "max"]
    counts = [str(judged.counts[what]) for what in OUTCOMES]
    rows = [["**all**", str(len(found.strikes)), *counts, *_times(found, found.strikes)]]
    for name, strikes in sorted(named.items()):
        counts = [str(judged.struck[name, what]) for what in OUTCOMES]
        rows.append([name, str(len(strikes)), *counts, *_times(found, strikes)])
    tried = sum(one.tries > 1 for one in found.judged)
    tokens = sum(one.tokens for one in found.judged)
    parts = [
        f"seed {seed}, {found.seconds:.0f} s, {len(found.judged)} requests, {tokens} tokens; "
        f"HTTP requests asked more than once: {tried}; completed: {judged.completed:.3%}, "
        f"completed or refused: {(judged.counts[RIGHT] + judged.counts[REFUSED]) / max(len(found.judged), 1):.3%}",
        markdown(head, rows),
    ]
    leaks = [f"{id} holds {held}" for id, held in found.held.items()]
    leaks += found.grown + [f"{id} tells nothing" for id in found.silent]
    parts.append("leaks: " + ("; ".join(leaks) or "none"))
    parts.append("ended unasked: " + ("; ".join(found.exits) or "none"))
    parts += [f"trouble: {trouble}" for trouble in found.troubles]
    never = [f"{strike.process} ({strike.way})" for strike in found.strikes if strike.back_s is None]
    parts += [f"never ready again: {', '.join(never)}"] if never else []
    parts += [f"- {count} x {reason}" for reason, count in judged.reasons.most_common(_TOLD)]
    return "\n\n".join([*parts, *(f"- {line}" for line in judged.evidence[:_TOLD])])


def _names(strike: Strike) -> Sequence[str]:
    """A strike counts by its way and by its victim's kind."""
    return (strike.way, f"of {strike.kind}")


def _times(found: Found, strikes: Sequence[Strike]) -> list[str]:
    gaps = [gap for strike in strikes if (gap := longest_gap(strike, found.judged)) is not None]
    back = [strike.back_s - strike.at_s for strike in strikes if strike.back_s is not None]
    broken = [at_s for one in found.judged for at_s in one.broken_s]
    return [
        str(sum(any(strike.at_s <= at_s <= strike.until_s for strike in strikes) for at_s in broken)),
        *(f"{percentile(gaps, p):.1f}" if gaps else "-" for p in (50, 99)),
        *(f"{percentile(back, p):.1f}" if back else "-" for p in (50, 100)),
    ]
