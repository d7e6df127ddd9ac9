"""Jittered exponential backoff (the "full jitter" of Brooker, AWS Architecture Blog, 2015)."""

from __future__ import annotations

import random

_FIRST_S = 0.05
_LONGEST_S = 1.0


def backoff_s(retry: int, rng: random.Random) -> float:
    """How long to wait before retry number `retry` (from 1): evenly between 0 and a bound that doubles each time."""
    return rng.uniform(0.0, min(_LONGEST_S, _FIRST_S * 2.0 ** min(retry - 1, 30)))
