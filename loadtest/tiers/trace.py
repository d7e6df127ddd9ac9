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
    from_l1: float
    """Of the hits."""
    from_l2: float | None
    """Of what L1 did not have, but an ideal cache would. None: nothing was left to it."""


def hit_rates(prompt_tokens: int, ideal: int, cached: int, from_ring: int) -> HitRates:
    """`cached`: tokens of all hits; `from_ring`: those that came from the cache nodes, the others being L1's."""
    local = max(cached - from_ring, 0)
    missed = ideal - local
    return HitRates(
        ideal / prompt_tokens,
        cached / ideal if ideal else 0.0,
        local / cached if cached else 0.0,
        min(from_ring / missed, 1.0) if missed > 0 else None,
    )
