"""Arguments, the runs, and their report."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loadtest.client import Observation
from loadtest.goals import Row, concluded, table
from loadtest.measurement import options, parsed, parser
from loadtest.memory import resident_bytes
from loadtest.overload.asking import Asker, Shape
from loadtest.overload.summary import (
    RAMP,
    RECOVERED_S,
    flood_rows,
    goodput,
    memory_row,
    overload_rows,
    recovery_row,
    ttfts,
)
from loadtest.prompts import Prompts
from loadtest.report import percentile
from loadtest.stack import Stack, stack
from pdbus import keyfile
from pdbus.tasks import cancelled

_SHAPE = Shape(64, 32)
_QUIET = Shape(64, 48)
_FLOOD = Shape(256, 32)
_QUIET_STREAMS, _FLOOD_STREAMS = 4, 48
_KV_BYTES = 160 << 20
"""Enough for what runs at once, and full of used pages before the overload begins: a page takes memory with its first
use, which is no growth."""
_ANSWERS = 4
"""A run is at least as long as so many, one after another."""
_SAMPLE_S = 0.5
_CHUNK_TOKENS = 512
_PROBE_S = 0.25
PARTS = ("overload", "flood")


def arguments(argv: list[str]) -> argparse.Namespace:
    made = parser("overload", "More than a stack can do for minutes; and one tenant's flood beside another.", 3)
    made.add_argument("--short", action="store_true", help="20 s instead of 5 minutes, and a single round")
    made.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="overload, flood")
    made.add_argument("--times", type=float, default=3.0, help="the capacity (default: %(default)s)")
    made.add_argument("--streams", type=int, default=48, help="of the best run (default: %(default)s)")
    return parsed(made, argv)


def main(argv: list[str]) -> int:
    given = arguments(argv)
    return concluded(given, measure(given))


async def measure(given: argparse.Namespace) -> dict[str, Sequence[Row]]:
    prompts = Prompts.of(given.model)
    found: dict[str, Sequence[Row]] = {}
    if "overload" in given.only:
        async with stack(*options(given), env={"PDBUS_KV_BYTES": str(_KV_BYTES)}) as running:
            found["overload"] = await overload(running, prompts, given)
        print(table({"overload": found["overload"]}), file=sys.stderr, flush=True)
    if "flood" in given.only:
        found["flood"] = await flood(prompts, given)
    return found


async def overload(running: Stack, prompts: Prompts, given: argparse.Namespace) -> list[Row]:
    """The best that it can do, then `times` as much, then whether all is as before. The streams of the best don't begin
    together: else they go on in step, and what falls into so short a time depends on where it cuts their waves."""
    best_s, over_s = (16.0, 20.0) if given.short else (60.0, 300.0)
    warm = await Asker(running, prompts, _SHAPE).closed(given.streams, best_s / 4)
    best_s, over_s = (max(least_s, _ANSWERS * _usual_s(warm)) for least_s in (best_s, over_s))
    seen = await Asker(running, prompts, _SHAPE, seed=1).closed(given.streams, best_s, spread_s=RAMP * best_s)
    best = goodput(seen, best_s, _SHAPE.deadline_s)
    rate = best / _SHAPE.new_tokens
    normal_s = percentile(ttfts(seen), 99)
    shape = replace(_SHAPE, deadline_s=max(2 * _usual_s(seen), 2.0))
    sampler, samples = _sample(running)
    try:
        over, probes = await asyncio.gather(
            Asker(running, prompts, shape, seed=2).open(given.times * rate, over_s),
            _probes(Asker(running, prompts, shape, seed=3), over_s),
        )
    finally:
        await cancelled(sampler)
    return [
        *overload_rows(best, over, over_s, shape.deadline_s, given.times),
        memory_row(samples),
        recovery_row(probes, normal_s),
    ]


def _usual_s(seen: Sequence[Observation]) -> float:
    """What an answer takes."""
    return percentile([one.end_s - one.due_s for one in seen if one.ok], 50)


async def _probes(asker: Asker, over_s: float) -> list[Observation]:
    """From the last arrival on, while those that were admitted are still answered; their clock begins there."""
    await asyncio.sleep(over_s)
    return await asker.at([_PROBE_S * number for number in range(int(2 * RECOVERED_S / _PROBE_S))])


def _sample(running: Stack) -> tuple[asyncio.Task[None], list[dict[str, int]]]:
    samples: list[dict[str, int]] = []

    async def sample() -> None:
        while True:
            samples.append({name: resident_bytes(pid) for name, pid in running.pids().items()})
            await asyncio.sleep(_SAMPLE_S)

    return asyncio.create_task(sample()), samples


async def flood(prompts: Prompts, given: argparse.Namespace) -> list[Row]:
    """A quiet tenant alone and beside a flood, in turns, on workers that read what they answer: how steps are shared is
    theirs alone, while processes of their own would share the machine's cores."""
    with tempfile.TemporaryDirectory(prefix="pdbus-load-") as folder:
        keys = Path(folder) / "keys.json"
        quiet, other = (keyfile.add(keys, tenant).text for tenant in ("quiet", "flood"))
        up = (*options(given), "--colocated")
        async with stack(*up, env={"PDBUS_KEYS_FILE": str(keys)}) as running:
            return await _in_turns(running, prompts, given, quiet, other)


async def _chunk_s(running: Stack, prompts: Prompts, key: str) -> float:
    """What reading one takes, without the way there and back."""
    first_s = []
    for tokens in (_CHUNK_TOKENS, 1):
        seen = await Asker(running, prompts, Shape(tokens, 1), key, 9).closed(1, 2.0)
        first_s.append(percentile(ttfts(seen), 50))
    return first_s[0] - first_s[1]


async def _in_turns(running: Stack, prompts: Prompts, given: argparse.Namespace, quiet: str, other: str) -> list[Row]:
    turn_s, rounds = (8.0, 1) if given.short else (30.0, given.rounds)
    alone: list[Observation] = []
    flooded: list[Observation] = []
    await Asker(running, prompts, _QUIET, quiet).closed(_QUIET_STREAMS, turn_s / 2)  # warm
    chunk_s = await _chunk_s(running, prompts, quiet)
    for number in range(rounds):
        alone += await Asker(running, prompts, _QUIET, quiet, 10 + number).closed(_QUIET_STREAMS, turn_s)
        flooding = asyncio.create_task(
            Asker(running, prompts, _FLOOD, other, 100 + number).closed(_FLOOD_STREAMS, turn_s * (1 + RAMP))
        )
        begun = time.perf_counter()
        await asyncio.sleep(RAMP * turn_s)
        flooded += await Asker(running, prompts, _QUIET, quiet, 50 + number).closed(_QUIET_STREAMS, turn_s)
        print(f"round {number + 1}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
        await flooding
    return flood_rows(alone, flooded, chunk_s)
