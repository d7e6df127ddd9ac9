"""Arguments, the run, and its report."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from platformdirs import user_cache_path

from loadtest.engine.columns import COLUMNS, Column, chosen
from loadtest.engine.rounds import Subject, run_rounds
from loadtest.engine.subjects import ProcessSubject, StackSubject
from loadtest.engine.table import Comparison, render
from loadtest.machine import describe, read_bandwidth
from loadtest.peers.base import Shape, Sources
from loadtest.peers.catalog import CATALOG
from loadtest.peers.hf_folder import cache_of, hf_folder
from loadtest.peers.precision import OURS, reads
from loadtest.prompts import Prompts
from pdbus.model.default import default_checkpoint

_NAMED = ("llama.cpp Q4_1", "llama.cpp Q4_0")
"""Peers that each get a ratio of their own: the default model's file as it is, and its fastest relative."""

_OTHERS = 1.0
"""Load average beyond the cores: an engine's own turn may leave as many as there are."""


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest engine",
        description="Our engine in process and through the whole stack, and other engines beside it.",
    )
    parser.add_argument("--peers", action="store_true", help="also every other engine that is installed")
    parser.add_argument("--columns", nargs="+", default=[], metavar="NAME", help=" ".join(c.name for c in COLUMNS))
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="rows whose name holds one of these")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each engine (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="folder or GGUF file (default: the stack's default model)")
    parser.add_argument("--cache", type=Path, help="where converted weights are kept, some GB (default: the user's)")
    parser.add_argument(
        "--peers-python", default=sys.executable, metavar="PATH", help="interpreter that has the peers (default: this)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args(argv)
    try:
        given.columns = chosen(given.columns)
    except ValueError as error:
        parser.error(str(error))
    if given.rounds < 1 or given.threads < 1:
        parser.error("rounds and threads must be positive")
    return given


def main(argv: list[str]) -> int:
    given = arguments(argv)
    comparison, about = asyncio.run(compare(given))
    print(render(comparison, _NAMED))
    highest = max((load for row in comparison.rows for load in row.load_averages), default=0.0)
    if highest > (os.cpu_count() or 1) + _OTHERS:
        tell(
            f"load average {highest:.1f}: others were at work, and engines whose threads wait for each other lose most"
        )
    if given.json:
        given.json.write_text(json.dumps({"machine": about, **comparison.as_json()}, indent=2) + "\n")
    return 0 if any(row.figures for row in comparison.rows) else 1


async def compare(given: argparse.Namespace) -> tuple[Comparison, dict[str, object]]:
    checkpoint = (given.model or default_checkpoint()).resolve()
    cache = cache_of(checkpoint, given.cache or user_cache_path("pdbus", appauthor=False) / "peers")
    prompts = Prompts.of(checkpoint)
    subjects, ours = rows(given, checkpoint, cache, prompts)
    about = {**describe(), "threads": given.threads, "rounds": given.rounds, "model": checkpoint.name}
    tell(f"{about['cpu']}, {about['cores']} cores, load average {about['load_average']}, {given.threads} threads")
    bandwidth = read_bandwidth(given.threads)
    columns: tuple[Column, ...] = given.columns
    found = await run_rounds(subjects, columns, given.rounds, prompts.draw, tell)
    # Noise of others can only slow the memory test down.
    bandwidth = max(bandwidth, read_bandwidth(given.threads))
    about["load_average_after"] = describe()["load_average"]
    return Comparison.of(columns, found, ours, bandwidth), about


def rows(
    given: argparse.Namespace, checkpoint: Path, cache: Path, prompts: Prompts
) -> tuple[list[Subject], frozenset[str]]:
    """The subjects, and the names of ours among them."""
    sources = Sources(checkpoint if checkpoint.is_file() else None, hf_folder(checkpoint, cache), cache)
    subjects: list[Subject] = []
    ours = []
    for name, entry in CATALOG.items():
        if entry.ours:
            [row] = entry.arguments
            weights = reads(row, Shape.of(prompts.config))
            subjects.append(ProcessSubject(name, sys.executable, sources, given.threads))
            stacks = {f"{name}, stack, apart": False, f"{name}, stack, colocated": True}
            subjects += [
                StackSubject(stack, checkpoint, OURS[row].options, weights, colocated)
                for stack, colocated in stacks.items()
            ]
            ours += [name, *stacks]
        elif given.peers:
            subjects.append(ProcessSubject(name, given.peers_python, sources, given.threads))
    wanted = [s for s in subjects if not given.only or any(text in s.name for text in given.only)]
    return wanted, frozenset(ours)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
