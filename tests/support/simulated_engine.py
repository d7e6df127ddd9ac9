"""The engine's scheduler behind a router's admission, in simulated seconds: a fleet of one worker, without a model."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from pdbus.context import Deadline
from pdbus.engine.scheduler import Limits, Scheduler
from pdbus.engine.sequence import Sequence
from pdbus.errors import DeadlineExceeded, Overloaded
from pdbus.kv.pages import PageTable
from pdbus.router.admission import Admission
from pdbus.router.demand import Demand
from pdbus.router.throughput import PROMPT_TOKEN
from pdbus.tasks import cancelled
from tests.support.sequences import sequence

PAGE, CHUNK = 16, 512
TOKEN_S, ROW_S, STEP_FIXED_S = 1e-3, 4e-3, 1e-2
_WAY_S = 0.01
"""From the router to the worker."""


@dataclass(frozen=True)
class Told:
    """What came of a request."""

    state: str
    """ok, late, or refused."""
    asked_s: float
    took_s: float
    tokens_s: tuple[float, ...] = ()
    """When each came; of a whole answer only."""

    @property
    def first_s(self) -> float:
        """To the first one."""
        return self.tokens_s[0] - self.asked_s if self.tokens_s else math.inf


class SimulatedEngine:
    def __init__(self, running: int, seed: int, scatter: float = 0.1) -> None:
        """`scatter`: of what steps take, in the logarithm."""
        self.admission = Admission(1024, 1024, fleet_slots=lambda: running)
        self.slower = 1.0
        """Times what steps take."""
        self._plan = Scheduler(PageTable(10_000), Limits(PAGE, CHUNK, running))
        self._draw, self._scatter = random.Random(seed), scatter
        self._work = asyncio.Event()
        self._ended: dict[Sequence, asyncio.Future[tuple[float, ...]]] = {}
        self._tokens_s: dict[Sequence, list[float]] = {}

    async def ask(self, prompt_tokens: int, new_tokens: int, deadline_s: float, tenant: str = "a") -> Told:
        asked_s, deadline = time.monotonic(), Deadline.after(deadline_s)
        state, tokens_s = "ok", tuple[float, ...]()
        try:
            demand = Demand(tenant, cost=PROMPT_TOKEN * prompt_tokens + new_tokens)
            async with self.admission.slot(1, deadline, demand):
                await asyncio.sleep(_WAY_S)
                one = sequence(self._plan.pages, [1] * prompt_tokens, new_tokens, deadline_s=deadline.at_monotonic_s)
                one.ticket = replace(one.ticket, tenant=tenant)
                self._ended[one] = asyncio.get_running_loop().create_future()
                self._plan.add(one)
                self._work.set()
                tokens_s = await self._ended[one]
        except DeadlineExceeded:
            state = "late"
        except Overloaded:
            state = "refused"
        return Told(state, asked_s, time.monotonic() - asked_s, tokens_s)

    async def run(self) -> None:
        while True:
            turn = self._plan.turn(time.monotonic())
            for one, error in turn.failed:
                one.hold.release()
                self._ended.pop(one).set_exception(error)
            chunks = [chunk for group in turn.groups for chunk in group]
            if not chunks:
                self._work.clear()
                await self._work.wait()
                continue
            sizes = [chunk.tokens for chunk in chunks]
            taken_s = STEP_FIXED_S + ROW_S * sizes.count(1) + TOKEN_S * sum(size for size in sizes if size > 1)
            taken_s *= self.slower * self._draw.lognormvariate(0.0, self._scatter)
            await asyncio.sleep(taken_s)
            for chunk in chunks:
                last, one = chunk.last, chunk.sequence
                self._plan.computed(chunk)
                if last:
                    self._tokens_s.setdefault(one, []).append(time.monotonic())
                    if one.append(7):
                        self._plan.remove(one)
                        one.hold.release()
                        self._ended.pop(one).set_result(tuple(self._tokens_s.pop(one)))
            self._plan.took(turn, taken_s)


@asynccontextmanager
async def simulated_engine(running: int, seed: int = 1) -> AsyncIterator[SimulatedEngine]:
    """To be used in simulated seconds (tests/support/simulated_time.py)."""
    made = SimulatedEngine(running, seed)
    steps = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        await cancelled(steps)
