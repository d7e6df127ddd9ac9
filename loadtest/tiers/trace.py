"""A trace of chats that share system prompts and go on over several turns, and how much of it could be cached. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Draw = Callable[[str, int], list[int]]
"""A prompt by label and length, in token ids."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Sizes of a trace. Sessions take turns at random; a turn's prompt is all that came before it, and a question."""

    systems: int = 4
    system_tokens: int = 384
    sessions: int = 12
    turns: int = 4
    question_tokens: int = 48
    answer_tokens: int = 32

    def prompts(self, draw: Draw, seed: int) -> list[list[int]]:
        """Every request's prompt, in order of arrival. Answers are made up: what a model says changes no length."""
        rng = random.Random(seed)
        order = [session for session in range(self.sessions) for _ in range(self.turns)]
        rng.shuffle(order)
        history = {
            session: draw(f"system/{rng.randrange(self.systems)}", self.system_tokens)
            for session in range(self.sessions)
        }
        asked = []
        for number, session in enumerate(order):
            history[session] = history[session] + draw(f"question/{seed}/{number}", self.question_tokens)
            asked.append(history[session])
            history[session] = history[session] + draw(f"answer/{seed}/{number}", self.answer_tokens)
        return asked


def cacheable(prompts: Sequence[Sequence[int]], page_tokens: int) -> list[int]:
    """For each prompt, the tokens in whole pages that some earlier one began with too; its last token never counts."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for prompt in prompts:
        pages = [tuple(prompt[: end + page_tokens]) for end in range(0, len(prompt) - page_tokens + 1, page_tokens)]
        shared = 0
        for page in pages:
            if page not in seen or len(page) >= len(prompt):
                break
            shared = len(page)
        seen.update(pages)
        found.append(shared)
    return found


@dataclass(frozen=True, slots=True)
class HitRates:
    """Shares of tokens."""

    cacheable: float
    """Of all prompt tokens."""
    hit: float
    """Of the cacheable ones, from any tier."""
    l1: float
    """Of the hits: from the workers' own pages."""
    l2: float | None
    """Of what L1 did not have, but an ideal cache would: from the memory of cache nodes. None: nothing was left."""
    l3: float | None
    """Likewise: from their disks."""


def hit_rates(prompt_tokens: int, ideal: int, l1: int, l2: int, l3: int) -> HitRates:
    """From the tokens that each tier gave. Workers may share pages that no earlier prompt ended with a whole one of."""
    hits, left = l1 + l2 + l3, max(ideal - l1, 0)
    return HitRates(
        ideal / prompt_tokens,
        min(hits / ideal, 1.0) if ideal else 0.0,
        l1 / hits if hits else 0.0,
        min(l2 / left, 1.0) if left else None,
        min(l3 / left, 1.0) if left else None,
    )
