"""Goal 5, its first half: layers read from disk as they are computed, because memory for weights is short."""

from __future__ import annotations

import asyncio
from functools import partial

from loadtest.goals import Row, at_least, at_most, none_of
from loadtest.streaming import measure as streaming
from loadtest.weights.terms import Terms

_SHARE = 0.2
_RATE = 0.3
_PROMPT_TOKENS = 512
_MEMORY_PERCENT = 100 * _SHARE


async def measure(terms: Terms) -> list[Row]:
    rounds = 3 if terms.short else 7
    found = await asyncio.to_thread(partial(streaming, terms.model, share=_SHARE, rounds=rounds, threads=2))
    how = f"int8, a budget of {_SHARE:.0%} of the model, in processes of their own, medians of {rounds}"
    peak = f"peak RSS {found.streamed.peak_bytes / 1e6:.0f} MB, all resident {found.resident.peak_bytes / 1e6:.0f} MB"
    same = found.equal and found.resident.logits == found.streamed.logits
    return [
        none_of("streamed: answers unlike the resident model's", int(not same), 1, f"{how}; text and logits' bits"),
        at_least(f"streamed: prefill rate at {_PROMPT_TOKENS} tokens", found.rate, _RATE, how),
        at_most("streamed: weights in memory", 100 * found.weight_memory, _MEMORY_PERCENT, "%", f"{how}; {peak}"),
    ]
