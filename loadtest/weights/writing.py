"""Updates of several processes, and a staging branch of several writers."""

from __future__ import annotations

from loadtest.goals import Row, beside
from loadtest.weights.terms import Terms, subject
from loadtest.writers import branch_pushes, shared_pushes

_TENSORS = ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight")
_WRITERS = 4


async def measure(terms: Terms) -> list[Row]:
    seconds = 3.0 if terms.short else 10.0
    async with subject(terms) as on:
        alone, both = [await shared_pushes(on.stack.nats_url, on.model, _TENSORS[:count]) for count in (1, 2)]
        rate, seal_s, sealed = await branch_pushes(
            on.stack.nats_url, on.model, _TENSORS[0], count=_WRITERS, seconds=seconds
        )
    return [
        beside("an update of a row in each of two parts", f"{both * 1e3:.0f} ms", f"of one part {alone * 1e3:.0f} ms"),
        beside("pushes to a branch, each durable", f"{rate:.0f} a second", f"{_WRITERS} writers, a row each time"),
        beside("sealing them", f"{seal_s:.1f} s", f"{sealed.entries} entries become one version"),
    ]
