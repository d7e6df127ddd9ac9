"""Arguments, the run, and its report."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from loadtest.asking import one
from loadtest.client import session
from loadtest.handoff.pairs import MODES, ask_in_turn
from loadtest.handoff.summary import Moments, against, cost, way, ways_ms, wire_ratio
from loadtest.handoff.wire import kv_traffic
from loadtest.markdown import markdown
from loadtest.measurement import options, parsed, parser, report
from loadtest.peers.base import Shape
from loadtest.prompts import Prompts
from loadtest.router.flood import flood
from loadtest.router.rig import MODEL, rig
from loadtest.stack import APART, stack

_STEP_S = 0.02
_WAY_S = 6.0
_LATER = ("first", "second")
"""Moments that are told against colocated: the first token needs no hand-over, the second one all of it."""


def arguments(argv: list[str]) -> argparse.Namespace:
    about = "The hand-over of a prompt's KV: its time beside local decode, its bytes, and the way of a token."
    made = parser("handoff", about, 5)
    made.add_argument("--tokens", type=int, default=1536, help="of each prompt (default: %(default)s)")
    made.add_argument("--samples", type=int, default=3, help="cold prompts a round (default: %(default)s)")
    return parsed(made, argv)


def main(argv: list[str]) -> int:
    given = arguments(argv)
    found = asyncio.run(measure(given))
    report(given, render(found), found)
    return 0 if found["costs"] else 1


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    prompts = Prompts.of(given.model)
    seen: dict[str, list[Moments]] = {mode: [] for mode in MODES}
    refused: dict[str, str] = {}
    wire: dict[str, float] = {}
    for number in range(given.rounds):
        labels = [f"handoff/{number}/{sample}" for sample in range(given.samples)]
        for mode, found in (await ask_in_turn(prompts, labels, given.tokens, options(given), refused)).items():
            seen[mode] += found
        costs = {mode: cost(found) for mode, found in seen.items() if found}
        print(f"round {number + 1}: {costs}", file=sys.stderr, flush=True)
    if seen["disaggregated"]:
        wire = await _wire(prompts, given.tokens, options(given))
    return {
        "costs": {mode: asdict(found) for mode, found in costs.items()},
        **{
            f"{name}_token_against_colocated": against(seen["disaggregated"], seen["colocated"], attrgetter(name))
            for name in _LATER
        },
        "wire": wire,
        "way_of_a_token": way(await _ways()),
        "refused": refused,
    }


async def _wire(prompts: Prompts, tokens: int, up: Sequence[str]) -> dict[str, float]:
    async with stack(*up, *APART) as running, session() as http, kv_traffic(running.nats_url) as traffic:
        await one(http, running, prompts.draw("wire", tokens), 2)
    ratio = wire_ratio(traffic.payload_bytes, tokens, Shape.of(prompts.config))
    return {"bytes": traffic.payload_bytes, "frames": traffic.frames, "ratio_to_fp16": ratio}


async def _ways() -> list[float]:
    """With simulated workers that make a token every 20 ms, as one stream at a time has them."""
    body = {"model": MODEL, "prompt": "on its way", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    async with rig(1, _STEP_S) as running:
        seen = await flood(running.urls, [body], duration_s=_WAY_S, keep_events=True)
        stamps = running.stamps
        await running.end()
        left = json.loads(stamps.read_text())
    return ways_ms(left, seen.events)


def render(found: dict[str, Any]) -> str:
    head = ["stack", "first token ms", "step ms", "hand-over ms", "of first token"]
    rows = [
        [mode, f"{c['first_ms']:.0f}", f"{c['step_ms']:.1f}", f"{c['handover_ms']:.1f}", f"{c['handover_share']:.1%}"]
        for mode, c in found["costs"].items()
    ]
    lines = [markdown(head, rows)]
    for name in _LATER:
        if (later := found[f"{name}_token_against_colocated"]) is not None:
            lines.append(f"{name} token, disaggregated against colocated: {later:+.1%} (median of the pairs)")
    if wire := found["wire"]:
        lines.append(f"on the wire: {wire['bytes'] / 1e6:.1f} MB, {wire['ratio_to_fp16']:.2f} of fp16")
    way_ms = found["way_of_a_token"]
    lines.append(f"worker to client over the bus: p50 {way_ms['p50_ms']:.2f} ms, p99 {way_ms['p99_ms']:.2f} ms")
    lines += [f"{mode}: not measured, `pdbus up` refused it: {why}" for mode, why in found["refused"].items()]
    return "\n".join(lines)
