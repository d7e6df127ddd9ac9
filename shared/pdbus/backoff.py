"""Jittered exponential backoff (the "full jitter" of Brooker, AWS Architecture Blog, 2015)."""

from __future__ import annotations

import random


def backoff_s(retry: int, rng: random.Random, *, first_s: float = 0.05, most_s: float = 1.0) -> float:
    """How long to wait before retry number `retry` (from 1): evenly between 0 and a bound that doubles each time."""
    return rng.uniform(0.0, min(most_s, first_s * 2.0 ** min(retry - 1, 30)))
