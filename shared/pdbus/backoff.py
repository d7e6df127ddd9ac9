"""When to ask again: jittered exponential backoff, and a budget that all retries of one asker share.

Backoff is the "full jitter" of Brooker (AWS Architecture Blog, 2015). The budget follows Finagle's RetryBudget and the
chapter "Addressing Cascading Failures" of Site Reliability Engineering (Beyer et al., 2016): retries may be a share of
what is asked for the first time, and few a second beside it, so that a server in trouble is not asked many times as
much as before. Here a retry that the budget doesn't cover yet is put off until it does, not given up.
"""

from __future__ import annotations

import random

_FIRST_S = 0.05
_LONGEST_S = 1.0


def backoff_s(retry: int, rng: random.Random) -> float:
    """How long to wait before retry number `retry` (from 1): evenly between 0 and a bound that doubles each time."""
    return rng.uniform(0.0, min(_LONGEST_S, _FIRST_S * 2.0 ** min(retry - 1, 30)))


class RetryBudget:
    """Each request adds `share` of a retry, each second `per_s`; no more than `most` are kept. It starts full.

    Used from one thread; `now_s` is of one monotonic clock."""

    def __init__(self, now_s: float, *, share: float = 0.2, per_s: float = 2.0, most: float = 20.0) -> None:
        self._share, self._per_s, self._most = share, per_s, most
        self._left = most
        """Below 0: so many are promised already, in the order in which they asked."""
        self._at_s = now_s

    def asked(self) -> None:
        """A request was sent for the first time."""
        self._left = min(self._most, self._left + self._share)

    def take(self, now_s: float) -> float:
        """Takes one retry; returns in how many seconds, from 0 on, the budget covers it."""
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        self._left -= 1.0
        return max(0.0, -self._left / self._per_s)

    def put_back(self) -> None:
        """A retry that was taken won't be made."""
        self._left = min(self._most, self._left + 1.0)
