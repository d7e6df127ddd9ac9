"""What the comparison asks of an engine, and what it gets back. No engine is imported here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Prompts = Sequence[Sequence[int]]


class Unusable(Exception):
    """The engine can't be compared here; the message is the reason, for one line."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One call of `generate`. Moments in seconds from the call."""

    first_s: float
    """When the first new token was there; for several prompts it may be 0 where the engine doesn't tell."""
    total_s: float
    new_tokens: int
    """Of each prompt."""
    ids: tuple[int, ...] = ()
    """Those of the first prompt: that an engine is fast says little unless it computes the same."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What a decode step must read at least: the share of the memory's bandwidth is worked out from it."""

    weight_bytes: int
    """All weights once; of an embedding that is not also the head, nothing."""
    kv_token_bytes: int
    """Keys and values of one token in all layers."""


class Engine(Protocol):
    """One engine with one model, loaded. Greedy, never ending before `new_tokens`, nothing cached between calls."""

    weights: Weights

    def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        """Continues every prompt by `new_tokens` tokens, all prompts at once. Prompts have one length."""
        ...


@dataclass(frozen=True, slots=True)
class Sources:
    """The weights that every engine gets, in the forms that their tools read."""

    gguf: Path | None
    """The checkpoint itself where it is a GGUF file."""
    folder: Path
    """The same in fp32 as a Hugging Face folder."""
    cache: Path
    """Where converted models go."""


class Peer(Protocol):
    """One engine in one precision, as a module of this folder offers it."""

    def prepare(self, sources: Sources) -> Path:
        """Converts the weights by the engine's own tools, unless that was done; returns where they lie.

        Runs in a process of its own, so that it doesn't count as the engine's memory. Raises Unusable."""
        ...

    def open(self, path: Path, sources: Sources, threads: int) -> Engine:
        """Raises Unusable."""
        ...


class Clock:
    """Times one call: `token` at each step that is told, at least the first; `timing` at the end."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first = 0.0

    def token(self) -> None:
        """Every prompt has one more new token."""
        if not self._first:
            self._first = time.perf_counter() - self._start

    def timing(self, ids: Sequence[int]) -> Timing:
        """`ids`: the new tokens of the first prompt. Raises Unusable if there are none."""
        total_s = time.perf_counter() - self._start
        if len(ids) == 0:
            raise Unusable("it made no token")
        return Timing(self._first, total_s, len(ids), tuple(map(int, ids)))


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama-family model, from the config of its Hugging Face folder."""

    parameters: int
    kv_values: int
    """Values of K and V of one token in all layers."""

    @classmethod
    def of(cls, config: dict[str, int | bool | None]) -> Shape:
        def size(name: str, default: int = 0) -> int:
            return int(config.get(name) or default)

        hidden, inner, vocab = size("hidden_size"), size("intermediate_size"), size("vocab_size")
        heads = size("num_attention_heads")
        head_dim = size("head_dim", hidden // heads)
        kv = size("num_key_value_heads", heads) * head_dim
        layer = 2 * hidden * heads * head_dim + 2 * hidden * kv + 3 * hidden * inner
        return cls(size("num_hidden_layers") * layer + vocab * hidden, size("num_hidden_layers") * 2 * kv)

    def weights(self, bits: float, kv_bytes: int) -> Weights:
        """With `bits` a weight on average, scales and zero points included, and `kv_bytes` a value of the cache."""
        return Weights(int(self.parameters * bits / 8), self.kv_values * kv_bytes)
