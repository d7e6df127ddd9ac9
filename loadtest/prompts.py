"""Prompts of an exact number of tokens, the same in every run and for every engine."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from loadtest.scenarios import words
from pdbus.model.checkpoint import open_checkpoint


class Prompts:
    """Draws from one tokenizer. Two prompts with different labels share no page of their beginning."""

    def __init__(self, meta: Mapping[str, bytes]) -> None:
        """`meta`: the checkpoint's files."""
        self._tokenizer = tokenizers.Tokenizer.from_str(meta["tokenizer.json"].decode())
        self.config: dict[str, Any] = json.loads(meta["config.json"])

    @classmethod
    def of(cls, checkpoint: str | Path) -> Prompts:
        return cls(open_checkpoint(checkpoint).meta)

    def draw(self, label: str, tokens: int) -> list[int]:
        """Everyday words at random, fixed by the label."""
        rng = random.Random(label)
        ids: list[int] = []
        while len(ids) < tokens:
            text = f"{rng.random():.6f} {words(rng, tokens)} "
            ids += self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids[:tokens]


def completion(model: str, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """The body that asks for exactly `new_tokens` greedy tokens after the prompt."""
    return {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
