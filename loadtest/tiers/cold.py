"""What a cold prompt loses by the tiers being there: the same stack with cache nodes and without, in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

import aiohttp

from loadtest.asking import one
from loadtest.client import session
from loadtest.prompts import Prompts
from loadtest.stack import Stack, stack

_IN_A_ROW = 2
"""Prompts of one turn, one right after the other: what the first leaves to be done is done beside the second."""
_SETTLE_S = 2.0
"""After a turn, so that what it left to be done is not done beside the other stack's."""
_NEW_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Pair:
    """Times to the first token, ms: the mean of a turn with the nodes, and of the one without them."""

    with_nodes: float
    without: float

    @property
    def difference(self) -> float:
        """By which part the nodes make it slower."""
        return self.with_nodes / self.without - 1


async def pairs(prompts: Prompts, tokens: int, count: int, options: Sequence[str]) -> list[Pair]:
    """Both stacks run all the time; only one has work at a time. Who goes first changes from pair to pair."""
    async with stack(*options) as full, stack(*options, "--cache-nodes", "0") as bare, session() as http:
        for each in (full, bare):
            for number in range(_IN_A_ROW):
                await one(http, each, prompts.draw(f"warm-up/{number}", tokens), _NEW_TOKENS)
        found = []
        for number in range(count):
            labels = [f"cold/{number}/{prompt}" for prompt in range(_IN_A_ROW)]
            order = (full, bare) if number % 2 else (bare, full)
            took = {each.data: await _turn(http, each, prompts, labels, tokens) for each in order}
            found.append(Pair(took[full.data], took[bare.data]))
    return found


async def _turn(
    http: aiohttp.ClientSession, running: Stack, prompts: Prompts, labels: Sequence[str], tokens: int
) -> float:
    await asyncio.sleep(_SETTLE_S)
    answers = [await one(http, running, prompts.draw(label, tokens), _NEW_TOKENS) for label in labels]
    return mean((answer.ttft_s or 0.0) * 1e3 for answer in answers)


def cost(found: Sequence[Pair]) -> dict[str, float]:
    """Medians over the pairs."""
    return {
        "with_nodes_ms": median(pair.with_nodes for pair in found),
        "without_ms": median(pair.without for pair in found),
        "difference": median(pair.difference for pair in found),
        "pairs": len(found),
    }
