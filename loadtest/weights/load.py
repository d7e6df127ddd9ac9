"""The load beside which weights change: distinct prompts of one length, open loop or closed, and what came of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.arrivals import poisson
from loadtest.client import Observation, ask
from loadtest.prompts import Prompts, completion
from loadtest.weights.terms import Subject

PROMPT_TOKENS, NEW_TOKENS = 64, 24
RAMP = 0.2
"""Of a load's duration, until as many answers run as will."""
_ANSWER_S = 60.0
_DRAWN_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: tuple[int, ...]
    seen: Observation


@dataclass(frozen=True, slots=True)
class Run:
    """Of one load. Moments are seconds from its start."""

    asked: tuple[Asked, ...]
    duration_s: float

    @property
    def failed(self) -> list[str]:
        """Why, of each that did."""
        return [one.seen.error for one in self.asked if one.seen.error]

    @property
    def tokens_per_s(self) -> float:
        """Of answers, from `RAMP` of the load on to its end: as many answers have begun before as end after."""
        begin_s, tokens = RAMP * self.duration_s, 0.0
        for seen in (one.seen for one in self.asked if one.seen.chunks_s):
            within = sum(begin_s <= moment <= self.duration_s for moment in seen.chunks_s)
            tokens += seen.output_tokens * within / len(seen.chunks_s)
        return tokens / (self.duration_s - begin_s)

    @property
    def requests_per_s(self) -> float:
        return sum(one.seen.ok and one.seen.end_s <= self.duration_s for one in self.asked) / self.duration_s


class Loader:
    """Draws prompts that share no page, and asks for them."""

    def __init__(self, prompts: Prompts) -> None:
        self._rng = random.Random(0)
        self._ids = prompts.draw("weights", _DRAWN_TOKENS)

    def prompt(self, tokens: int = PROMPT_TOKENS) -> tuple[int, ...]:
        return tuple(self._rng.choices(self._ids, k=tokens))

    def body(self, model: str, prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
        return completion(model, list(prompt), new_tokens) | {"return_token_ids": True}

    async def closed(self, subject: Subject, streams: int, duration_s: float) -> Run:
        """So many answers at any time: saturation, where they are enough."""
        start = time.perf_counter()
        asked: list[Asked] = []

        async def stream() -> None:
            while (now := time.perf_counter() - start) < duration_s:
                asked.append(await self._one(subject, now, start))

        await asyncio.gather(*(stream() for _ in range(streams)))
        return Run(tuple(asked), duration_s)

    async def open(self, subject: Subject, rate: float, duration_s: float, seed: int) -> Run:
        """Arrivals that don't wait for the server, drawn by the seed."""
        start = time.perf_counter()

        async def one(due_s: float) -> Asked:
            await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - start)))
            return await self._one(subject, due_s, start)

        asked = await asyncio.gather(*(one(due_s) for due_s in poisson(rate, duration_s, seed)))
        return Run(tuple(asked), duration_s)

    async def _one(self, subject: Subject, due_s: float, start: float) -> Asked:
        prompt = self.prompt()
        seen = await ask(subject.http, subject.url, self.body(subject.model, prompt), due_s, start, _ANSWER_S)
        return Asked(prompt, seen)
