"""The precisions that our engine is measured in, and what a decode step reads in each."""

from __future__ import annotations

from loadtest.peers.base import Shape, Weights

OURS: dict[str, tuple[float, int]] = {"fp32": (32.0, 4)}
"""Name, as `pdbus up --precision` takes it -> (bits of a weight with its share of scales, bytes of a value of KV)."""


def reads(precision: str, sizes: Shape) -> Weights:
    return sizes.weights(*OURS[precision])
