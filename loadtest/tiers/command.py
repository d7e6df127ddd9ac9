"""Arguments, the run, and its report."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.asking import one
from loadtest.client import session
from loadtest.machine import describe
from loadtest.markdown import markdown
from loadtest.metrics import counters
from loadtest.prompts import Prompts
from loadtest.stack import stack
from loadtest.tiers.phases import Sample, phases
from loadtest.tiers.trace import Trace, cacheable, hit_rates
from pdbus.kv.format import PAGE_TOKENS
from pdbus.model.default import default_checkpoint

_CACHE_BYTES = 3 << 30
"""Of the cache node: the trace shall not be what fills it."""


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest tiers",
        description="Time to first token of a warm prefix by tier, and hit rates on a trace of chats.",
    )
    parser.add_argument("--tokens", type=int, default=1536, help="of each prefix (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=3, help="prefixes a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="each with a new stack (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=Trace().sessions, help="of the trace (default: %(default)s)")
    parser.add_argument("--trace-kv-bytes", type=int, help="of a worker's pool, so that L1 can't hold the whole trace")
    parser.add_argument("--model", type=Path, help="folder or GGUF file (default: the stack's default model)")
    parser.add_argument("--up", nargs=argparse.REMAINDER, default=[], help="further arguments of `pdbus up`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    given = arguments(argv)
    found = asyncio.run(measure(given))
    print(render(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    checkpoint = (given.model or default_checkpoint()).resolve()
    prompts = Prompts.of(checkpoint)
    options = ("--model", str(checkpoint), *given.up)
    env = {"PDBUS_CACHE_BYTES": str(_CACHE_BYTES)}
    samples: list[Sample] = []
    for number in range(given.rounds):
        labels = [f"tiers/{number}/{sample}" for sample in range(given.samples)]
        async with stack(*options, env=env) as running, session() as http:
            await one(http, running, prompts.draw(f"warm-up/{number}", given.tokens), 2)
            samples += await phases(http, running, prompts, labels, given.tokens)
        print(f"round {number + 1}: {summary(samples)}", file=sys.stderr, flush=True)
    if given.trace_kv_bytes:
        env["PDBUS_KV_BYTES"] = str(given.trace_kv_bytes)
    trace = await _trace(prompts, Trace(sessions=given.sessions), options, env)
    known = {"machine": describe(), "prefix_tokens": given.tokens, "tiers": summary(samples), "trace": trace}
    return known | {"samples": [asdict(sample) for sample in samples]}


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


async def _trace(prompts: Prompts, trace: Trace, options: Sequence[str], env: dict[str, str]) -> dict[str, Any]:
    asked = trace.prompts(prompts.draw, seed=0)
    ideal = cacheable(asked, PAGE_TOKENS)
    async with counters() as known, stack(*options, env=env | known.env) as running, session() as http:
        answers = [await one(http, running, prompt, 2) for prompt in asked]
        await known.settle()
        from_ring = int(known.total("pdbus.cache.reads", kind="kv", outcome="hit")) * PAGE_TOKENS
        reads = known.by("pdbus.cache.reads")
    cached = sum(answer.cached_tokens for answer in answers)
    rates = hit_rates(sum(map(len, asked)), sum(ideal), cached, from_ring)
    return {"requests": len(asked), "cache_node_reads": reads, **asdict(rates)}


def render(found: dict[str, Any]) -> str:
    rows = [
        [tier, f"{f['first_ms']:.0f}", f"{f['below_cold']:.1f}", f"{f['cached_tokens']:.0f}"]
        for tier, f in found["tiers"].items()
    ]
    lines = [markdown(["prefix from", "first token ms", "times below cold", "cached tokens"], rows)]
    empty = [tier for tier, f in found["tiers"].items() if tier != "cold" and not f["cached_tokens"]]
    lines += [f"{tier}: nothing was found there" for tier in empty]
    trace = found["trace"]
    l2 = "nothing was left to it" if trace["from_l2"] is None else f"{trace['from_l2']:.0%}"
    lines.append(
        f"trace of {trace['requests']} requests: {trace['cacheable']:.0%} of prompt tokens could be cached, "
        f"{trace['hit']:.0%} of them were; of the hits {trace['from_l1']:.0%} from L1; of the rest from L2: {l2}"
    )
    return "\n".join(lines)
