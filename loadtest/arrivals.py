"""When requests arrive: a Poisson process, drawn before the run so that the load never waits for the server."""

from __future__ import annotations

import random


def poisson(rate_per_s: float, duration_s: float, seed: int) -> list[float]:
    """Arrival times in seconds from the start, ascending, all below `duration_s`.

    Gaps are exponential with mean 1/rate: an open loop, in which a slow server meets the same arrivals as a fast one.
    Raises ValueError for a rate or duration that is not positive.
    """
    if rate_per_s <= 0 or duration_s <= 0:
        raise ValueError(f"rate and duration must be positive, not {rate_per_s} and {duration_s}")
    draw = random.Random(seed)
    times: list[float] = []
    now = draw.expovariate(rate_per_s)
    while now < duration_s:
        times.append(now)
        now += draw.expovariate(rate_per_s)
    return times
