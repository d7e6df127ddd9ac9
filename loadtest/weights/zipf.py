"""A trace as a recommender's front end makes it: users come by a Zipf law, and are shown items by another. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdbus.weights.blocks import Array


@dataclass(frozen=True, slots=True)
class Zipf:
    """Sizes of the trace: the k-th most frequent of n comes with a weight of 1 / k^s."""

    users: int = 2000
    items: int = 20_000
    user_s: float = 1.1
    item_s: float = 1.1
    candidates: int = 32
    """Items that one request is about."""

    def draw(self, requests: int, seed: int = 0) -> tuple[Array, Array]:
        """(users [requests], items [requests, candidates])."""
        rng = np.random.default_rng(seed)
        users = rng.choice(self.users, requests, p=_weights(self.users, self.user_s))
        items = rng.choice(self.items, (requests, self.candidates), p=_weights(self.items, self.item_s))
        return users, items

    @property
    def told(self) -> str:
        return (
            f"Zipf: {self.users} users (s={self.user_s:g}), {self.items} items (s={self.item_s:g}), "
            f"{self.candidates} of them a request"
        )


def _weights(count: int, s: float) -> Array:
    weights = 1.0 / np.arange(1, count + 1) ** s
    scaled: Array = weights / weights.sum()
    return scaled
