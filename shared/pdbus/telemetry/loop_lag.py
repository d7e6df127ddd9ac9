"""How late an event loop runs what is due: whatever holds it up delays every token and every reply of its process.

What is promised: 99.9 % of it under 20 ms while the process serves.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import accumulate

from opentelemetry.metrics import CallbackOptions, Observation

from pdbus.tasks import cancelled
from pdbus.telemetry.spans import meter

_EVERY_S = 0.02
_RECENT = int(60 / _EVERY_S)
_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_QUANTILES = (0.5, 0.99, 0.999, 1.0)


@asynccontextmanager
async def event_loop_lag() -> AsyncIterator[None]:
    """Measures this loop, every 20 ms, while the scope lasts.

    `pdbus.event_loop.lag.samples`: all since the start, counted by `le`, an upper bound, as Prometheus counts those of
    a histogram: an instrument of that kind would take longer at each sample than all the rest. `…lag.recent`: quantiles
    of the last minute, `quantile="1"` the largest."""
    counts = [0] * (len(_BUCKETS_S) + 1)
    recent: deque[float] = deque(maxlen=_RECENT)

    def quantiles(_: CallbackOptions) -> Iterable[Observation]:
        ordered = sorted(recent.copy())  # copied in one go: the reader may be another thread
        for quantile in _QUANTILES if ordered else ():
            at = min(int(quantile * len(ordered)), len(ordered) - 1)
            yield Observation(ordered[at], {"quantile": f"{quantile:g}"})

    def so_far(_: CallbackOptions) -> Iterable[Observation]:
        for bound, count in zip((*map("{:g}".format, _BUCKETS_S), "+Inf"), accumulate(counts), strict=True):
            yield Observation(count, {"le": bound})

    meter().create_observable_counter(
        "pdbus.event_loop.lag.samples", [so_far], "{sample}", "How late the event loop ran what was due, by upper bound"
    )
    meter().create_observable_gauge(
        "pdbus.event_loop.lag.recent", [quantiles], "s", "Quantiles of the event loop's lag in the last minute"
    )

    async def measure() -> None:
        while True:
            # Not the loop's own clock: it may stand still while the loop is held up.
            due_s = time.monotonic() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            late_s = max(time.monotonic() - due_s, 0.0)
            counts[bisect_left(_BUCKETS_S, late_s)] += 1
            recent.append(late_s)

    task = asyncio.create_task(measure())
    try:
        yield
    finally:
        await cancelled(task)
