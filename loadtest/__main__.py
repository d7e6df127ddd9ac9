"""`python -m loadtest`: an open-loop load on a running stack, and the same load on a peer beside it; or a measurement.

`python -m loadtest engine|…` measures one subject of its own, on a stack or workers that it starts and ends itself.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from loadtest.arrivals import poisson
from loadtest.client import Observation, with_key
from loadtest.report import Report, summarize, table
from loadtest.runner import draw_bodies, first_model, run
from loadtest.scenarios import SCENARIOS
from pdbus.settings import load as load_settings
from pdbus.stack.settings import StackSettings

MEASUREMENTS = {
    "engine": "our engine and our stack beside other engines",
    "grow": "how cost grows with length, batch, context, workers and routers",
    "tiers": "time to first token of a warm prefix, by the tier that it comes from",
    "handoff": "what the hand-over from prefill to decode costs",
    "interference": "steady streams while long prompts arrive, disaggregated and colocated",
    "quality": "perplexity and greedy tokens of each precision, against fp32",
    "invariance": "bits that do not depend on batch, chunks, caches or hand-over, and what that costs",
    "weights_rows": "row updates a second of a sparse table, and how soon another process sees them",
    "weights": "what changing weights costs while the system serves, goal by goal",
    "overload": "three times what a stack can do; and one tenant's flood beside another's streams",
    "failover": "from the death of a decode worker to the next token of its streams",
    "router": "requests a second and added latency of the router, with simulated workers",
    "chaos": "nothing lost, wrong or leaked while processes are killed, stopped, cut off and restarted",
    "fuzz": "garbage of every kind: nothing crashes, hangs or grows, and good requests are answered at the end",
    "jobs": "durable jobs a second, and the time to their results, with simulated workers",
    "consistency": "no answer mixes two versions: a model that tells them, commits every second, injected faults",
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    measured = "\n".join(f"  {name:12} {about}" for name, about in MEASUREMENTS.items())
    known = "\n".join(f"  {scenario.name:10} {scenario.about}" for scenario in SCENARIOS.values())
    parser = argparse.ArgumentParser(
        prog="python -m loadtest",
        description=__doc__,
        epilog=f"scenarios:\n{known}\n\nmeasurements (each has its own --help):\n{measured}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "scenario", nargs="*", default=["mixed"], help="which to run, one after another (default: mixed)"
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the stack (default: %(default)s; PDBUS_API_KEY is its key)"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="URL", help="run the same load there too")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second (default: %(default)s)")
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of arrivals (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="repeat, servers in turn, so that drift hits all alike")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and prompts (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.scenario) - SCENARIOS.keys()):
        parser.error(f"no scenario {', '.join(unknown)}; known: {', '.join(SCENARIOS)}")
    if options.rate <= 0 or options.duration <= 0 or options.rounds < 1 or options.timeout <= 0:
        parser.error("rate, duration, rounds and timeout must be positive")
    return options


async def load(options: argparse.Namespace) -> list[Report]:
    """Every scenario on every server, `rounds` times in turn; observations of a server are pooled over the rounds."""
    ours = options.url.rstrip("/")
    headers = {ours: with_key(load_settings(StackSettings).api_key)}  # a key of ours is nothing to show to a peer
    urls = dict.fromkeys([ours, *(url.rstrip("/") for url in options.peer)])
    targets = {url: await first_model(url, headers.get(url)) for url in urls}
    reports = []
    for name in options.scenario:
        pooled: dict[str, list[Observation]] = {url: [] for url in targets}
        for turn in range(options.rounds):
            arrivals = poisson(options.rate, options.duration, options.seed + turn)
            for url, model in targets.items():
                bodies = draw_bodies(SCENARIOS[name], len(arrivals), options.seed + turn, model)
                seen = await run(url, bodies, arrivals, options.timeout, _progress(url, name), headers.get(url))
                pooled[url] += _after(pooled[url], seen)
        reports += [summarize(url, name, observations) for url, observations in pooled.items()]
    return reports


def _after(earlier: list[Observation], new: list[Observation]) -> list[Observation]:
    """Shifts a round behind the earlier ones, so that wall time adds up."""
    offset_s = max((seen.end_s for seen in earlier), default=0.0)
    for seen in new:
        seen.due_s, seen.sent_s, seen.end_s = seen.due_s + offset_s, seen.sent_s + offset_s, seen.end_s + offset_s
        seen.chunks_s = [moment + offset_s for moment in seen.chunks_s]
    return new


def _progress(url: str, scenario: str) -> Callable[[int, int], None]:
    def show(finished: int, count: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{url} {scenario}: {finished}/{count}", end="\n" if finished == count else "", file=sys.stderr)

    return show


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    if given and given[0] in MEASUREMENTS:
        # Each brings libraries of its own, which the others must not need.
        measure: Callable[[list[str]], int] = importlib.import_module(f"loadtest.{given[0]}.command").main
        return measure(given[1:])
    options = arguments(given)
    reports = asyncio.run(load(options))
    print(table(reports))
    if options.json:
        options.json.write_text(json.dumps([report.as_json() for report in reports], indent=2) + "\n")
    return 0 if all(report.completed == report.sent for report in reports) else 1


if __name__ == "__main__":
    raise SystemExit(main())
