"""What snapshots cost the answers that they are made of: time per token with and without, in turns on two stacks.

And processor time, of all of a stack's processes: it tells the same where others use the machine too."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadtest.client import ask, session
from loadtest.cpu import used_ms
from loadtest.failover.trial import ANSWER_S, percentile
from loadtest.measurement import options
from loadtest.prompts import Prompts, completion
from loadtest.stack import Stack, stack

WITH, WITHOUT = "100", "0"
"""As PDBUS_SNAPSHOT_TOKENS."""


@dataclass(frozen=True)
class Itl:
    """Seconds, by PDBUS_SNAPSHOT_TOKENS."""

    gaps_s: dict[str, list[float]]
    """Of all rounds."""
    ratios: list[float]
    """Of each round: mean time per token with snapshots, in times of that without."""
    cpu_ratios: list[float]
    """Likewise, of processor time."""

    def as_json(self) -> dict[str, Any]:
        return {
            "ratio": statistics.median(self.ratios),
            "ratios": self.ratios,
            "cpu_ratio": statistics.median(self.cpu_ratios),
            "cpu_ratios": self.cpu_ratios,
            **{
                f"{name}_{share}": percentile(self.gaps_s[tokens], share)
                for name, tokens in (("with", WITH), ("without", WITHOUT))
                for share in (0.5, 0.99)
            },
        }


async def measure_itl(given: argparse.Namespace) -> Itl:
    """Both stacks stand all the time, and one of them answers."""
    prompts, up = Prompts.of(given.model), (*options(given), "--decode", "1", "--cache-nodes", "1")
    gaps: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    ratios: list[float] = []
    cpu_ratios: list[float] = []
    async with AsyncExitStack() as life:
        http = await life.enter_async_context(session())
        stacks = {
            tokens: await life.enter_async_context(stack(*up, env={"PDBUS_SNAPSHOT_TOKENS": tokens})) for tokens in gaps
        }
        for number in range(-1, given.itl_rounds):  # one to warm up
            means: dict[str, float] = {}
            used: dict[str, float] = {}
            for tokens in (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH):
                before_ms = _used_ms(stacks[tokens])
                seen = await _gaps(http, stacks[tokens], prompts, given, f"itl/{number}")
                used[tokens] = _used_ms(stacks[tokens]) - before_ms
                means[tokens] = statistics.fmean(seen)
                if number >= 0:
                    gaps[tokens] += seen
            if number >= 0:
                ratios.append(means[WITH] / means[WITHOUT])
                cpu_ratios.append(used[WITH] / used[WITHOUT])
    return Itl(gaps, ratios, cpu_ratios)


def _used_ms(running: Stack) -> float:
    return sum(used_ms(running.pids()).values())


async def _gaps(
    http: aiohttp.ClientSession, running: Stack, prompts: Prompts, given: argparse.Namespace, label: str
) -> list[float]:
    bodies = [
        completion(running.model, prompts.draw(f"{label}/{at}", given.prompt_tokens), given.new_tokens)
        for at in range(given.streams)
    ]
    answers = await asyncio.gather(*(ask(http, running.url, body, 0.0, 0.0, ANSWER_S) for body in bodies))
    if broken := [answer.error for answer in answers if not answer.ok]:
        raise RuntimeError(f"an answer failed: {broken[0]}")
    return [gap for answer in answers for gap in answer.gaps_s]
