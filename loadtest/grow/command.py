"""Arguments, the run, and its report."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from loadtest.grow.curves import Curve, render
from loadtest.grow.runs import runs
from loadtest.machine import describe
from pdbus.model.default import default_checkpoint

CURVES = {
    "ttft-by-length": ("prompt tokens", "TTFT, s"),
    "itl-by-batch": ("streams", "ITL, ms"),
    "itl-by-context": ("tokens before", "ITL, ms"),
    "throughput-by-workers": ("prefill and decode workers each", "tokens in and out a second"),
    "throughput-by-routers": ("routers", "requests a second"),
}


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest grow",
        description="How cost grows, as numbers and as one picture a curve (matplotlib: the extra `plots`).",
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 256, 512, 1024, 2048, 4096, 8000], metavar="N")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16], metavar="N")
    parser.add_argument("--contexts", nargs="+", type=int, default=[64, 512, 1024, 2048, 4096, 8000], metavar="N")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], metavar="N", help="of each kind")
    parser.add_argument("--routers", nargs="+", type=int, default=[1, 2, 3], metavar="N")
    parser.add_argument("--new-tokens", type=int, default=48, help="of each stream (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=16, help="at once, by workers (default: %(default)s)")
    parser.add_argument("--duration", type=float, default=4.0, help="seconds of each number of routers")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--model", type=Path, help="folder or GGUF file (default: the stack's default model)")
    parser.add_argument("--up", nargs=argparse.REMAINDER, default=[], help="further arguments of `pdbus up`")
    parser.add_argument("--out", type=Path, default=Path("grow"), metavar="DIR", help="pictures and grow.json go there")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    given = arguments(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    curves = asyncio.run(measure(given))
    print(render(curves))
    known = {"machine": describe(), "rounds": given.rounds, "curves": [curve.as_json() for curve in curves]}
    (given.out / "grow.json").write_text(json.dumps(known, indent=2) + "\n")
    if find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed (pip install 'pdbus[plots]')", file=sys.stderr)
        return 0
    draw: Callable[[list[Curve], Path], list[Path]] = import_module("loadtest.grow.plots").plot
    for path in draw(curves, given.out):
        print(path)
    return 0


async def measure(given: argparse.Namespace) -> list[Curve]:
    checkpoint = (given.model or default_checkpoint()).resolve()
    measuring = runs(checkpoint, given.up, given.new_tokens)
    curves = {name: Curve(name, x, y) for name, (x, y) in CURVES.items()}
    ttft, by_batch, by_context, by_workers, by_routers = curves.values()
    for number in range(given.rounds):
        await measuring.ttft(ttft, given.lengths, number)
        await measuring.itl(by_batch, by_context, given.batches, given.contexts, number)
        await measuring.throughput(by_workers, given.workers, given.requests, number)
        await measuring.routers(by_routers, given.routers, 64, given.duration)
        print(f"round {number + 1} of {given.rounds} is over", file=sys.stderr, flush=True)
    return list(curves.values())
