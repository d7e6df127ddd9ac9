"""One request of a client, repeated while that may help: jittered backoff, inside its deadline and a shared budget."""

from __future__ import annotations

import asyncio
import random
import time

from pdbus.backoff import RetryBudget, backoff_s
from pdbus.context import RequestContext
from pdbus.errors import DeadlineExceeded, PdbusError


class Retries:
    def __init__(self, budget: RetryBudget, rng: random.Random, ctx: RequestContext) -> None:
        self._budget, self._rng, self._deadline = budget, rng, ctx.deadline
        self._count = 0
        self._last: PdbusError | None = None
        budget.asked()

    def progressed(self) -> None:
        """An answer began: what fails after that is another matter than what failed before."""
        self._count, self._last = 0, None

    async def failed(self, error: PdbusError) -> None:
        """Returns when it is time to ask again. Raises `error` where that can't help or no time is left; or what went
        wrong before, where all that can be said of the last attempt is that it was cut short by the deadline."""
        if not error.retryable:
            raise self._last if self._last and isinstance(error, DeadlineExceeded) else error
        self._count, self._last = self._count + 1, error
        wait_s = max(backoff_s(self._count, self._rng), (error.retry_after_s or 0.0) * self._rng.uniform(0.5, 1.0))
        wait_s += self._budget.take(time.monotonic())
        if wait_s >= self._deadline.remaining_s:
            self._budget.put_back()
            raise error
        await asyncio.sleep(wait_s)
