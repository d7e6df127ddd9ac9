"""Steps of eight answers, four of them on another version: in one step that shares its common layers, and in two."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdbus.canonical import content_digest
from pdbus.kv.codec import PagePool
from pdbus.model.backend import Backend, Model
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import Checkpoint
from pdbus.model.config import ModelConfig, expected_tensors
from pdbus.model.families import writing
from pdbus.weights.layer import layer_of

ANSWERS = 8
CHANGED_LAYERS = 2


@dataclass(frozen=True, slots=True)
class TwoRoots:
    """Steps a second, each of a token for all answers; medians of interleaved rounds."""

    one_root: float
    """All answers on one version."""
    together: float
    """Half of them on each of two, in one step."""
    apart: float
    """The same in a step for each version."""

    @property
    def share(self) -> float:
        """Of the speed of one version that two keep."""
        return self.together / self.one_root


def measure_two_roots(
    checkpoint: Checkpoint, *, threads: int = 2, context_tokens: int = 128, rounds: int = 5, steps: int = 8
) -> TwoRoots:
    """With the stack's default precision. Takes some seconds to load, and then 3 * rounds * steps steps."""
    config = writing(checkpoint.config)
    backend = open_backend(BackendOptions(threads=threads), config)
    try:
        one, other = versions(backend, checkpoint, changed(config, CHANGED_LAYERS))
        return _compared(backend, one, other, context_tokens, rounds, steps)
    finally:
        backend.close()


def changed(config: ModelConfig, layers: int) -> tuple[str, ...]:
    """So many layers, spread evenly."""
    return tuple(f"layers.{(2 * at + 1) * config.layers // (2 * layers)}" for at in range(layers))


def versions(backend: Backend, checkpoint: Checkpoint, layers: Sequence[str]) -> tuple[Model, Model]:
    """The checkpoint, and beside it one whose `layers` are others."""
    config = writing(checkpoint.config)
    names = [layer_of(name) for name in expected_tensors(config)]
    first = {name: content_digest(name.encode()) for name in names}
    second = first | {name: content_digest(name.encode() + b" changed") for name in layers}
    one = backend.build(config, first, _Tensors(checkpoint, ()), None)
    return one, backend.build(config, second, _Tensors(checkpoint, layers), one)


class _Tensors(Mapping[str, np.ndarray]):
    """Read as they are asked for, those of `layers` a little larger than they are."""

    def __init__(self, checkpoint: Checkpoint, layers: Sequence[str]) -> None:
        self._checkpoint, self._layers = checkpoint, layers
        self._last: tuple[str, np.ndarray] | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        if self._last is None or self._last[0] != name:
            read = self._checkpoint.source.read(name)
            self._last = name, read * np.float32(1.01) if layer_of(name) in self._layers else read
        return self._last[1]

    def __iter__(self) -> Any:
        return iter(self._checkpoint.source.shapes)

    def __len__(self) -> int:
        return len(self._checkpoint.source.shapes)


def _compared(backend: Backend, one: Model, other: Model, context: int, rounds: int, steps: int) -> TwoRoots:
    page_format = backend.page_format(one.config)
    pages = page_format.pages_for(context + 1)
    pool = backend.pool(page_format, ANSWERS * pages)
    held = [range(at * pages, (at + 1) * pages) for at in range(ANSWERS)]
    half = ANSWERS // 2
    for at, ids in enumerate(held):
        tokens = [1 + at] * context
        (one if at < half else other).forward(Batch(tokens, [SequenceSlice(0, context, 0, ids)], []), pool)
    whole, first, second = (_answers(part, context) for part in (held, held[:half], held[half:]))
    taken_s: dict[str, list[float]] = {"one": [], "together": [], "apart": []}
    for _ in range(rounds):
        for way, seconds in taken_s.items():
            started_s = time.perf_counter()
            for _ in range(steps):
                _step(way, one, other, pool, whole, first, second)
            seconds.append((time.perf_counter() - started_s) / steps)
    return TwoRoots(*(1.0 / statistics.median(seconds) for seconds in taken_s.values()))


def _step(way: str, one: Model, other: Model, pool: PagePool, whole: Batch, first: Batch, second: Batch) -> None:
    match way:
        case "one":
            one.forward(whole, pool)
        case "together":
            one.forward(first, pool, beside=[(other, second)])
        case _:
            one.forward(first, pool)
            other.forward(second, pool)


def _answers(held: Sequence[Sequence[int]], context: int) -> Batch:
    """The next token of each."""
    slices = [SequenceSlice(at, 1, context, ids) for at, ids in enumerate(held)]
    return Batch([1] * len(held), slices, range(len(held)))
