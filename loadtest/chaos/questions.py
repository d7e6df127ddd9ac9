"""A fixed set of requests, each with one right answer: greedy and seeded, chats and completions, long and short."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

Ids = tuple[tuple[int, ...], ...]
"""Of an answer's tokens, choice by choice."""


@dataclass(frozen=True)
class Right:
    """What an undisturbed run answered, choice by choice."""

    ids: Ids
    texts: tuple[str, ...]


_PROMPT_TOKENS = (20, 60, 300, 900)
_NEW_TOKENS = (8, 60, 200, 600)
_BEGINNINGS = 3
"""Prompts share them, so that caches of every tier are in play."""


@dataclass(frozen=True)
class Question:
    endpoint: Literal["chat.completions", "completions"]
    body: dict[str, Any]
    """Without model and stream."""

    @property
    def path(self) -> str:
        return f"/v1/{self.endpoint.replace('.', '/')}"

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))


def questions(count: int, context_tokens: int, seed: int) -> list[Question]:
    """Of a model whose tokens are bytes (loadtest/tiny.py)."""
    rng = random.Random(seed)
    beginnings = ["".join(rng.choices("abcdefghij ", k=max(_PROMPT_TOKENS))) for _ in range(_BEGINNINGS)]
    return [_question(rng, rng.choice(beginnings), context_tokens) for _ in range(count)]


def _question(rng: random.Random, beginning: str, context_tokens: int) -> Question:
    read = rng.choice(_PROMPT_TOKENS)
    shared = rng.randrange(read)
    prompt = beginning[:shared] + "".join(rng.choices("klmnopqrst ", k=read - shared))
    most = min(rng.choice(_NEW_TOKENS), context_tokens - read - 100)
    body: dict[str, Any] = {"max_tokens": most, "ignore_eos": True, "return_token_ids": True}
    if rng.random() < 0.4:
        body |= {"temperature": 0}
    else:
        body |= {"temperature": 1.0, "seed": rng.randrange(1 << 30), "top_p": rng.choice((1.0, 0.9))}
    if rng.random() < 0.1:
        body["n"] = 2
    if rng.random() < 0.5:
        return Question("chat.completions", body | {"messages": [{"role": "user", "content": prompt}]})
    return Question("completions", body | {"prompt": prompt})
