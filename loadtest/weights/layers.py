"""What layers that two versions have in common save: in steps that serve both, and for prompts that were cached."""

from __future__ import annotations

import asyncio
from functools import partial

from loadtest.goals import Row, beside
from loadtest.two_roots import ANSWERS, CHANGED_LAYERS, measure_two_roots
from loadtest.upper_update import measure_upper_update
from loadtest.weights.terms import Terms
from pdbus.model.checkpoint import open_checkpoint


async def measure(terms: Terms) -> list[Row]:
    rounds = 3 if terms.short else 7
    checkpoint = open_checkpoint(terms.model)
    two = await asyncio.to_thread(partial(measure_two_roots, checkpoint, rounds=rounds))
    upper = await asyncio.to_thread(partial(measure_upper_update, checkpoint, rounds=rounds))
    how = f"{ANSWERS} answers, {CHANGED_LAYERS} layers differ, against a step for each version, medians of {rounds}"
    times = f"cold {upper.cold_s:.2f} s, from layer {upper.layer} on {upper.resumed_s:.2f} s, hit {upper.hit_s:.2f} s"
    return [
        beside("two versions in one step", f"{two.together / two.apart:.2f} × the rate", how),
        beside("the same against one version", f"{two.share:.2f} × the rate", "all answers on one"),
        beside("a cached prompt after an update of upper layers", f"{upper.saved:.0%} saved", f"{times}; in process"),
    ]
