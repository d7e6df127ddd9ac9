"""The measurements behind the curves."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp

from loadtest.asking import at_once, one
from loadtest.client import session
from loadtest.grow.curves import Curve
from loadtest.prompts import Prompts
from loadtest.router.flood import flood
from loadtest.router.rig import rig
from loadtest.router.summary import bodies
from loadtest.stack import Stack, stack

_SHORT_TOKENS = 64


@dataclass(frozen=True)
class Runs:
    """Each method adds one round of samples to a curve."""

    prompts: Prompts
    options: tuple[str, ...]
    """Of `pdbus up`."""
    new_tokens: int
    """Of each stream whose ITL counts."""

    async def ttft(self, curve: Curve, lengths: Sequence[int], number: int) -> None:
        async with self._stack() as (running, http):
            for length in lengths:
                answer = await one(http, running, self.prompts.draw(f"ttft/{number}/{length}", length), 2)
                curve.add(length, answer.ttft_s or 0.0)

    async def itl(
        self, by_batch: Curve, by_context: Curve, batches: Sequence[int], contexts: Sequence[int], number: int
    ) -> None:
        async with self._stack() as (running, http):
            for batch in batches:
                by_batch.add(batch, await self._gap_ms(running, http, f"batch/{number}/{batch}", batch, _SHORT_TOKENS))
            for context in contexts:
                by_context.add(context, await self._gap_ms(running, http, f"context/{number}/{context}", 1, context))

    async def throughput(self, curve: Curve, workers: Sequence[int], requests: int, number: int) -> None:
        """Of n prefill and n decode workers on the same cores: tokens in and out a second."""
        for count in workers:
            async with self._stack("--prefill", str(count), "--decode", str(count)) as (running, http):
                label = f"workers/{number}/{count}"
                prompts = [self.prompts.draw(f"{label}/{i}", 4 * _SHORT_TOKENS) for i in range(requests)]
                await one(http, running, self.prompts.draw(f"warm-up/{label}", _SHORT_TOKENS), 4)
                start = time.perf_counter()
                answers = await at_once(http, running, prompts, self.new_tokens)
                seconds = time.perf_counter() - start
                curve.add(count, sum(len(p) + a.output_tokens for p, a in zip(prompts, answers, strict=True)) / seconds)

    async def routers(self, curve: Curve, counts: Sequence[int], streams: int, duration_s: float) -> None:
        """Requests a second of n routers with simulated workers."""
        for count in counts:
            async with rig(count) as running:
                await flood(running.urls, bodies(streams, 32), 1.0)
                seen = await flood(running.urls, bodies(streams, 32), duration_s)
                curve.add(count, len(seen.latencies_s) / (seen.ended_s - seen.began_s))

    async def _gap_ms(self, running: Stack, http: aiohttp.ClientSession, label: str, batch: int, context: int) -> float:
        prompts = [self.prompts.draw(f"{label}/{i}", context) for i in range(batch)]
        answers = await at_once(http, running, prompts, self.new_tokens)
        # From when the last of them began on: before, some are still being read.
        since = max(answer.chunks_s[0] for answer in answers)
        gaps = [
            gap
            for answer in answers
            for moment, gap in zip(answer.chunks_s, answer.gaps_s, strict=False)
            if moment >= since
        ]
        return median(gaps or answers[0].gaps_s) * 1e3

    @asynccontextmanager
    async def _stack(self, *more: str) -> AsyncIterator[tuple[Stack, aiohttp.ClientSession]]:
        async with stack(*self.options, *more) as running, session() as http:
            await one(http, running, self.prompts.draw("warm-up", _SHORT_TOKENS), 8)
            yield running, http


def runs(checkpoint: Path, up: Sequence[str], new_tokens: int) -> Runs:
    return Runs(Prompts.of(checkpoint), ("--model", str(checkpoint), *up), new_tokens)
