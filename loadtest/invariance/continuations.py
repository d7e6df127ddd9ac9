"""Greedy continuations in fp32: computed in large batches, and once more each alone; how many differ, and how near the
two best tokens were to each other there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.invariance.engine import Engine
from pdbus.model.batch import Batch, SequenceSlice

_AT_ONCE = 64
_CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Differing:
    continuations: int
    tokens: int
    """Of each."""
    differing: int
    """Continuations that are another text alone."""
    widest_margin: float
    """Between the two best logits at a first difference, at most; above the class's epsilon it would be no tie."""

    @property
    def share(self) -> float:
        return self.differing / self.continuations


def differing(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> Differing:
    """All prompts have the same length."""
    batched = asyncio.run(_batched(engine, prompts, new_tokens))
    margins = [margin for prompt, ids in zip(prompts, batched, strict=True) if (margin := _margin(engine, prompt, ids))]
    return Differing(len(prompts), new_tokens, len(margins), max(margins, default=0.0))


async def _batched(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Through scheduler and step loop, `_AT_ONCE` side by side."""
    pages = _AT_ONCE * engine.page_format.pages_for(len(prompts[0]) + new_tokens)
    async with engine.running(pages, _CHUNK_TOKENS) as running:
        asked = [running.sequence(prompt, new_tokens) for prompt in prompts]
        answers = await asyncio.gather(*(running.answer(one, witnessed=False) for one in asked))
    return [answer.ids for answer in answers]


def _margin(engine: Engine, prompt: Sequence[int], ids: Sequence[int]) -> float | None:
    """Reads the prompt and its continuation alone, in one chunk, as a worker does that continues another's answer.

    Where greedy decoding would first have left the continuation: how far the best token is ahead of the next; None
    where it would not have."""
    tokens = [*prompt, *ids[:-1]]
    pages = range(engine.page_format.pages_for(len(tokens)))
    pool = engine.backend.pool(engine.page_format, len(pages))
    rows = range(len(prompt) - 1, len(tokens))
    logits = engine.version.model.forward(Batch(tokens, [SequenceSlice(0, len(tokens), 0, pages)], rows), pool)
    left = np.flatnonzero(logits.argmax(1) != np.array(ids))
    if not len(left):
        return None
    second, best = np.partition(logits[left[0]], -2)[-2:]
    return float(best - second)
