"""Time to the first token of a cached prompt after an update of the upper layers, against a cold and a full hit."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from loadtest.two_roots import versions
from pdbus.kv.codec import PagePool
from pdbus.kv.format import StreamFormat
from pdbus.kv.prefix import group_starts
from pdbus.model.backend import Model
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.batch import Batch, SequenceSlice
from pdbus.model.checkpoint import Checkpoint
from pdbus.model.families import writing

_CHUNK_TOKENS = 512
"""As the workers' default."""


@dataclass(frozen=True, slots=True)
class UpperUpdate:
    """Seconds, medians of interleaved rounds."""

    layer: int
    """The update begins with it."""
    cold_s: float
    resumed_s: float
    """From that layer on; copying what is below it counts."""
    hit_s: float
    stream_share: float
    """Memory for what enters that layer, against that of the pages."""

    @property
    def saved(self) -> float:
        """Of a cold run's time."""
        return 1 - self.resumed_s / self.cold_s


def measure_upper_update(
    checkpoint: Checkpoint, *, threads: int = 2, prompt_tokens: int = 1536, groups: int = 3, rounds: int = 3
) -> UpperUpdate:
    """With the stack's default precision, an update of the highest of `groups` equal runs of layers. Takes some seconds
    to load, and then about 1.4 cold prompts a round."""
    config = writing(checkpoint.config)
    backend = open_backend(BackendOptions(threads=threads), config)
    try:
        layer = group_starts(config.layers, groups)[-1]
        old, new = versions(backend, checkpoint, [f"layers.{at}" for at in range(layer, config.layers)])
        page_format, streams = backend.page_format(config), StreamFormat((layer,), config.hidden_size)
        pages = page_format.pages_for(prompt_tokens)
        pool = backend.pool(page_format, 2 * pages, streams)
        kept, own = range(pages), range(pages, 2 * pages)
        # All but the last page, as workers share them.
        shared = (prompt_tokens - 1) // page_format.page_tokens * page_format.page_tokens
        _read(old, pool, kept, 0, prompt_tokens)
        cold: list[float] = []
        resumed: list[float] = []
        hit: list[float] = []
        for _ in range(rounds):
            cold.append(_read(new, pool, own, 0, prompt_tokens))
            started_s = time.perf_counter()
            pool.copy_below(layer, kept, own)
            copied_s = time.perf_counter() - started_s
            upper_s = _read(new, pool, own, 0, shared, layer)
            hit.append(_read(new, pool, own, shared, prompt_tokens))
            resumed.append(copied_s + upper_s + hit[-1])
    finally:
        backend.close()
    return UpperUpdate(
        layer=layer,
        cold_s=statistics.median(cold),
        resumed_s=statistics.median(resumed),
        hit_s=statistics.median(hit),
        stream_share=streams.page_bytes / page_format.page_bytes,
    )


def _read(model: Model, pool: PagePool, pages: range, start: int, until: int, first_layer: int = 0) -> float:
    """Computes these tokens of a prompt, and the logits of the last one in a whole step. Returns the seconds taken."""
    began_s = time.perf_counter()
    for at in range(start, until, _CHUNK_TOKENS):
        count = min(_CHUNK_TOKENS, until - at)
        tokens = [1 + position % 1000 for position in range(at, at + count)]
        wanted = [count - 1] if at + count == until and not first_layer else []
        model.forward(Batch(tokens, [SequenceSlice(0, count, at, pages)], wanted, first_layer), pool)
    return time.perf_counter() - began_s
