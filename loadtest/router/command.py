"""Arguments, the run, and its report."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import uvloop

from loadtest.cpu import per_request, used_ms
from loadtest.machine import describe
from loadtest.router.flood import flood
from loadtest.router.rig import rig
from loadtest.router.summary import Figures, bodies, figures, pooled, render

_WARM_S = 1.0


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest router",
        description="Requests a second and latency of routers on a real bus, with workers that answer at once.",
    )
    parser.add_argument("--routers", nargs="+", type=int, default=[1, 2], metavar="N", help="(default: 1 2)")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64, 256], metavar="N", help="at once")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (default: %(default)s)")
    parser.add_argument("--duration", type=float, default=5.0, help="seconds of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args(argv)
    if min(*given.routers, *given.streams, given.tokens, given.rounds) < 1 or given.duration <= 0:
        parser.error("everything must be positive")
    return given


def main(argv: list[str]) -> int:
    given = arguments(argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rounds, errors = runner.run(measure(given))
    rows = [pooled(found) for found in rounds.values()]
    print(render(rows))
    for reason, count in errors.items():
        print(f"{count} x {reason}")
    if given.json:
        known = {"machine": describe(), "tokens": given.tokens, "medians": [asdict(row) for row in rows]}
        known["rounds"] = [asdict(one) for found in rounds.values() for one in found]
        given.json.write_text(json.dumps(known, indent=2) + "\n")
    return 1 if errors else 0


async def measure(given: argparse.Namespace) -> tuple[dict[tuple[int, int], list[Figures]], Counter[str]]:
    """(routers, streams) -> figures of each round, and what went wrong."""
    found: dict[tuple[int, int], list[Figures]] = {(r, s): [] for r in given.routers for s in given.streams}
    errors: Counter[str] = Counter()
    for number in range(given.rounds):
        for routers in given.routers:
            async with rig(routers) as running:
                await flood(running.urls, bodies(max(given.streams), given.tokens), _WARM_S)
                for streams in given.streams:
                    before = used_ms(running.pids)
                    seen = await flood(running.urls, bodies(streams, given.tokens), given.duration, pieces=given.tokens)
                    cpu_ms = per_request(before, used_ms(running.pids), len(seen.latencies_s))
                    errors.update(seen.errors)
                    found[routers, streams].append(figures(routers, seen, cpu_ms))
                    print(f"round {number + 1}: {found[routers, streams][-1]}", file=sys.stderr, flush=True)
    return found, errors
