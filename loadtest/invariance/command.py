"""Arguments, the run, and its report."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from dataclasses import asdict
from pathlib import Path

from loadtest.invariance.continuations import Differing, differing
from loadtest.invariance.engine import Engine
from loadtest.invariance.linears import Cost, costs
from loadtest.invariance.linears import render as render_costs
from loadtest.invariance.summary import Comparison, compare, render
from loadtest.invariance.ways import Prompts, Ways
from loadtest.machine import describe
from loadtest.prompts import Prompts as Drawn
from pdbus.errors import PdbusError
from pdbus.model.backends import BackendOptions, EngineName
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.model.default import default_checkpoint
from pdbus.model.families import writing

_ROWS = (1, 8, 512)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest invariance",
        description="Whether a request's logits depend on batch, chunks, caches or hand-over, to the bit; what that "
        "costs; and how many greedy continuations in fp32 do. Exit code 1 where a bit differs.",
    )
    parser.add_argument("--precision", choices=["fp32", "int8", "int4"], default="int8", help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=16, help="at once (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=600, help="prompt tokens at most (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=20, help="of each answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of the cost (default: %(default)s)")
    parser.add_argument("--continuations", type=int, default=2000, help="in fp32; 0: none (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="of each prompt and continuation (default: %(default)s)")
    parser.add_argument(
        "--engines", nargs="+", choices=["native", "torch"], default=["native"], help="for those (default: native)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(default: %(default)s)")
    parser.add_argument("--model", type=Path, help="folder or GGUF file (default: the stack's default model)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args(argv)
    if min(given.requests, given.new_tokens, given.rounds, given.tokens, given.threads) < 1 or given.longest < 32:
        parser.error("everything must be positive, and the longest prompt have 32 tokens at least")
    return given


def main(argv: list[str]) -> int:
    given = arguments(argv)
    path = (given.model or default_checkpoint()).resolve()
    checkpoint, drawn = open_checkpoint(path), Drawn.of(path)
    try:
        compared = bits(given, checkpoint, drawn)
        print(f"{given.precision}, {given.requests} requests\n\n{render(compared)}\n", flush=True)
        cost = costs(writing(checkpoint.config), _ROWS, given.threads, given.rounds)
        load = describe()["load_average"]  # engines whose threads wait for each other lose most by others' work
        print(
            f"int8 linears of one layer, {given.threads} threads, load average {load}\n\n{render_costs(cost)}\n",
            flush=True,
        )
        shares = {}
        for name in given.engines if given.continuations else ():
            shares[name] = share(given, checkpoint, drawn, name)
            print(told(name, shares[name]), flush=True)
    except PdbusError as error:
        print(error.message, file=sys.stderr)
        return 1
    if given.json:
        given.json.write_text(json.dumps(as_json(given, compared, cost, shares), indent=2) + "\n")
    broken = [one.way for one in compared if not one.equal]
    print(f"NOT INVARIANT: {'; '.join(broken)}" if broken else "every bit is the same")
    return 1 if broken else 0


def bits(given: argparse.Namespace, checkpoint: Checkpoint, drawn: Drawn) -> list[Comparison]:
    engine = Engine(checkpoint, BackendOptions("native", given.precision, threads=given.threads))
    try:
        found = asyncio.run(Ways(engine, prompts(given, drawn), given.new_tokens).all())
    finally:
        engine.close()
    reference = found[0][1]
    return [compare(way, answers, reference, took_place) for way, answers, took_place in found]


def prompts(given: argparse.Namespace, drawn: Drawn) -> Prompts:
    """Of all lengths up to the longest, at page boundaries and off them."""
    rng = random.Random("invariance")
    lengths = [given.longest, 32, *(rng.randint(24, given.longest) for _ in range(given.requests))][: given.requests]
    return [drawn.draw(f"invariance/{number}", length) for number, length in enumerate(lengths)]


def share(given: argparse.Namespace, checkpoint: Checkpoint, drawn: Drawn, name: EngineName) -> Differing:
    engine = Engine(checkpoint, BackendOptions(name, "fp32", "fp32", threads=given.threads))
    try:
        short = [drawn.draw(f"continuation/{number}", given.tokens) for number in range(given.continuations)]
        return differing(engine, short, given.tokens)
    finally:
        engine.close()


def told(name: str, found: Differing) -> str:
    counted = f"{found.differing} of {found.continuations} continuations of {found.tokens} tokens differ"
    apart = f"; the two best logits were at most {found.widest_margin:.1e} apart there" if found.differing else ""
    return f"fp32, {name}: {counted} ({found.share:.2%}){apart}"


def as_json(
    given: argparse.Namespace, compared: list[Comparison], cost: list[Cost], shares: dict[str, Differing]
) -> dict[str, object]:
    return {
        "machine": describe(),
        "precision": given.precision,
        "ways": [asdict(one) | {"equal": one.equal} for one in compared],
        "linears_us": [one.as_json() for one in cost],
        "fp32": {name: asdict(found) | {"share": found.share} for name, found in shares.items()},
    }
