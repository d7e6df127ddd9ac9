"""The watermark model: a Llama whose answers tell which version of each of its parts they were computed with.

Every part (embedding, attention and MLP of each layer, LM head) of version v adds the *mark* of v to a channel of the
residual stream that belongs to one layer. An answer's n-th token names a layer and what is in that layer's channel, as
a whole number; so as many tokens as there are layers tell the marks of all parts. The attention weighs all positions
alike, and its values carry the mark of the layer that made them: what it adds is the mean of the marks in the KV
cache, many times a mark, so that even one foreign token among FURTHEST changes the number.

In exact arithmetic all of it is integers, but for that mean. The residual stream has one huge constant channel, which
makes RMSNorm a multiplication by a constant; in fp32 what is left of its error is below 0.01, and the answer's token is
the nearest whole number. The answer does not depend on the prompt, but for its *lane* and for the layer that is told
first: both are those of the prompt's last token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

LAYERS = 4
LANES = 2
MODULI = (11, 13, 15, 16)
"""Of the marks in each layer's channel: two versions at most 10 apart differ in every layer."""
FURTHEST = 64
"""Tokens of a prompt and its answer up to which a single foreign token of KV shows."""
KV_WEIGHT = FURTHEST // 2 + 1
VALUES = (KV_WEIGHT + 3) * max(MODULI)
"""What a layer's channel can hold, from 0 on."""
FIRST = 512
"""The first token id that is an answer's: those before it are bytes and special tokens."""
VOCABULARY = FIRST + LANES * LAYERS * VALUES


@dataclass(frozen=True)
class Marks:
    """Which version each part is of. `attention` and `mlp`: by layer."""

    embedding: int = 0
    attention: tuple[int, ...] = (0,) * LAYERS
    mlp: tuple[int, ...] = (0,) * LAYERS
    head: int = 0

    @classmethod
    def pure(cls, version: int) -> Marks:
        return cls(version, (version,) * LAYERS, (version,) * LAYERS, version)

    def layers(self, version: int, *which: int) -> Marks:
        """With these layers of another version."""
        changed = dict.fromkeys(which, version)
        return replace(
            self,
            attention=tuple(changed.get(layer, old) for layer, old in enumerate(self.attention)),
            mlp=tuple(changed.get(layer, old) for layer, old in enumerate(self.mlp)),
        )

    def top(self, version: int) -> Marks:
        """With another LM head and another MLP in the last layer: no prompt's KV depends on either."""
        return replace(self, mlp=(*self.mlp[:-1], version), head=version)

    def value(self, layer: int) -> int:
        """What the layer's channel holds in the end."""
        told = KV_WEIGHT * mark(self.attention[layer], layer) + mark(self.mlp[layer], layer)
        return told + mark(self.embedding, layer) + mark(self.head, layer)


def mark(version: int, layer: int) -> int:
    return version % MODULI[layer]


def answer(marks: Marks, prompt: Sequence[int], tokens: int) -> list[int]:
    """The answer's token ids, by version and prompt, when nothing is mixed."""
    lane, layer = place(prompt[-1])
    turns = ((layer + turn) % LAYERS for turn in range(1, tokens + 1))
    return [token(lane, turn, marks.value(turn)) for turn in turns]


def token(lane: int, layer: int, value: int) -> int:
    return FIRST + (lane * LAYERS + layer) * VALUES + value


def place(id: int) -> tuple[int, int]:
    """(lane, layer) of a token."""
    at = (id - FIRST) // VALUES if id >= FIRST else id % (LANES * LAYERS)
    return divmod(at, LAYERS)


def told(id: int) -> int | None:
    """The value that an answer's token tells; None for one that no answer has."""
    return (id - FIRST) % VALUES if id >= FIRST else None


def follows(prompt: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether the tokens tell the layers that an answer to the prompt has to, in its lane, whatever their values."""
    lane, layer = place(prompt[-1])
    return all(id >= FIRST and place(id) == (lane, (layer + turn) % LAYERS) for turn, id in enumerate(ids, 1))


def explain(prompt: Sequence[int], ids: Sequence[int], named: Marks, known: Iterable[int]) -> str:
    """What an answer that differs from that of the version it names tells of itself, for a person; "" for the answer.

    `known`: the versions that there are; those of them that a single part may have been taken from are told."""
    if list(ids) == answer(named, prompt, len(ids)):
        return ""
    if not follows(prompt, ids):
        return "tokens of another prompt's answer, or of no answer"
    found = []
    for turn in sorted(set(ids), key=place):
        layer, value = place(turn)[1], told(turn) or 0
        if value != named.value(layer):
            parts = [
                f"{part} of {other}"
                for other in known
                for part, marks in _swaps(named, layer, other)
                if marks.value(layer) == value
            ]
            found.append(
                f"layer {layer} tells {value}, not {named.value(layer)} ({', '.join(parts) or 'stale KV, or several'})"
            )
    return "; ".join(found)


def _swaps(named: Marks, layer: int, other: int) -> list[tuple[str, Marks]]:
    """`named` with one part that the layer's channel tells of taken from another version."""

    def at_layer(marks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(other if at == layer else mark for at, mark in enumerate(marks))

    return [
        ("embedding", replace(named, embedding=other)),
        ("attention or KV", replace(named, attention=at_layer(named.attention))),
        ("MLP", replace(named, mlp=at_layer(named.mlp))),
        ("head", replace(named, head=other)),
        ("layer", named.layers(other, layer)),
    ]
