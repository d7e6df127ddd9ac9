"""Arguments, the runs, and their report."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from loadtest.asking import one
from loadtest.client import session
from loadtest.markdown import markdown
from loadtest.measurement import options, parsed, parser, report
from loadtest.metrics import counters
from loadtest.prompts import Prompts
from loadtest.stack import stack
from loadtest.tiers.cold import cost, pairs
from loadtest.tiers.phases import Sample, phases
from loadtest.tiers.trace import Trace, cacheable, hit_rates
from pdbus.kv.format import PAGE_TOKENS

PARTS = ("warm", "cold", "trace")
_CACHE_BYTES = 3 << 30
"""Of the cache node: the trace shall not be what fills it."""


def arguments(argv: list[str]) -> argparse.Namespace:
    made = parser("tiers", "Time to first token of a warm prefix by tier, of a cold one, and hit rates of chats.", 2)
    made.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    made.add_argument("--tokens", type=int, default=1536, help="of each prefix (default: %(default)s)")
    made.add_argument("--samples", type=int, default=3, help="prefixes a round (default: %(default)s)")
    made.add_argument("--pairs", type=int, default=5, help="of cold turns (default: %(default)s)")
    made.add_argument("--sessions", type=int, default=Trace().sessions, help="of the trace (default: %(default)s)")
    made.add_argument("--trace-kv-bytes", type=int, help="of a worker's pool, so that L1 can't hold the whole trace")
    return parsed(made, argv)


def main(argv: list[str]) -> int:
    given = arguments(argv)
    found = asyncio.run(measure(given))
    report(given, render(found), found)
    return 0


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    prompts = Prompts.of(given.model)
    found: dict[str, Any] = {}
    if "warm" in given.only:
        samples = await _warm(given, prompts)
        found |= {"tiers": summary(samples), "samples": [asdict(sample) for sample in samples]}
    if "cold" in given.only:
        taken = await pairs(prompts, given.tokens, given.pairs, options(given))
        found |= {"cold": cost(taken), "cold_pairs": [asdict(pair) for pair in taken]}
    if "trace" in given.only:
        found["trace"] = await _trace(given, prompts, Trace(sessions=given.sessions))
    return found


async def _warm(given: argparse.Namespace, prompts: Prompts) -> list[Sample]:
    samples: list[Sample] = []
    for number in range(given.rounds):
        labels = [f"tiers/{number}/{sample}" for sample in range(given.samples)]
        async with stack(*options(given), env=_env()) as running, session() as http:
            await one(http, running, prompts.draw(f"warm-up/{number}", given.tokens), 2)
            samples += await phases(http, running, prompts, labels, given.tokens)
        print(f"round {number + 1}: {summary(samples)}", file=sys.stderr, flush=True)
    return samples


def summary(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Tier -> medians of time and cached tokens, and how many times below cold its time is."""
    by: dict[str, list[Sample]] = {}
    for sample in samples:
        by.setdefault(sample.tier, []).append(sample)
    firsts = {tier: median(one.first_ms for one in own) for tier, own in by.items()}
    return {
        tier: {
            "first_ms": firsts[tier],
            "below_cold": firsts["cold"] / firsts[tier],
            "cached_tokens": median(sample.cached_tokens for sample in own),
        }
        for tier, own in by.items()
    }


async def _trace(given: argparse.Namespace, prompts: Prompts, trace: Trace) -> dict[str, Any]:
    asked = trace.prompts(prompts.draw, seed=0)
    ideal = cacheable(asked, PAGE_TOKENS)
    pool = {"PDBUS_KV_BYTES": str(given.trace_kv_bytes)} if given.trace_kv_bytes else {}
    async with counters() as known, stack(*options(given), env=_env() | pool | known.env) as running, session() as http:
        for prompt in asked:
            await one(http, running, prompt, 2)
        await known.settle()
        own = known.total("pdbus.prefix.tokens", source="worker")
        memory, disk = (
            PAGE_TOKENS * known.total("pdbus.cache.reads", kind="kv", outcome="hit", tier=tier)
            for tier in ("memory", "disk")
        )
        reads = known.by("pdbus.cache.reads")
    rates = hit_rates(sum(map(len, asked)), sum(ideal), int(own), int(memory), int(disk))
    return {"requests": len(asked), "cache_node_reads": reads, **asdict(rates)}


def _env() -> dict[str, str]:
    return {"PDBUS_CACHE_BYTES": str(_CACHE_BYTES)}


def render(found: dict[str, Any]) -> str:
    lines: list[str] = []
    if tiers := found.get("tiers"):
        rows = [
            [tier, f"{f['first_ms']:.0f}", f"{f['below_cold']:.1f}", f"{f['cached_tokens']:.0f}"]
            for tier, f in tiers.items()
        ]
        lines.append(markdown(["prefix from", "first token ms", "times below cold", "cached tokens"], rows))
        empty = [tier for tier, f in tiers.items() if tier != "cold" and not f["cached_tokens"]]
        lines += [f"{tier}: nothing was found there" for tier in empty]
    if cold := found.get("cold"):
        lines.append(
            f"cold, {cold['pairs']} pairs: {cold['with_nodes_ms']:.0f} ms with cache nodes, "
            f"{cold['without_ms']:.0f} ms without: {cold['difference']:+.1%} (median of the pairs)"
        )
    if trace := found.get("trace"):
        l2, l3 = ("nothing was left" if share is None else f"{share:.0%}" for share in (trace["l2"], trace["l3"]))
        lines.append(
            f"trace of {trace['requests']} requests: {trace['cacheable']:.0%} of prompt tokens could be cached, "
            f"{trace['hit']:.0%} of them were; of the hits {trace['l1']:.0%} from L1; of what L1 did not have, "
            f"from L2: {l2}, from L3: {l3}"
        )
    return "\n".join(lines)
