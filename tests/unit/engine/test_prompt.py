"""A prompt that is read here: it waits for the lower tiers only where that is worth it, and tries anew at times."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from pdbus.context import Deadline
from pdbus.engine.core import Core
from pdbus.engine.prefix_tier import PrefixTier
from pdbus.engine.prompt import Prompt
from pdbus.engine.scheduler import Limits
from pdbus.engine.sequence import Ended, Event, Produced, Started
from pdbus.kv.format import PageFormat
from pdbus.kv.pool import KvPool
from tests.support.asking import until
from tests.support.ring import Ring, fleet_of
from tests.support.sequences import SCOPE, ticket

TOKENS = 43  # ten full pages


class Model:
    """Always the same next token."""

    def forward(self, batch: Any, pool: Any, on_layer: Any, beside: Any = ()) -> np.ndarray:
        return np.eye(1, 20, 9, dtype=np.float32).repeat(len(batch.logit_rows), 0)


class Reader:
    """Reads prompts one after another, as a job does."""

    def __init__(self, ring: Ring, nodes: int) -> None:
        pool = KvPool(PageFormat(layers=2, kv_heads=1, head_dim=2, page_tokens=4), 20)
        self.core = Core(pool, Limits(4, 64, 8), self._hear, lambda error: None)
        self.tier = PrefixTier(ring, fleet_of(nodes), self.core)  # type: ignore[arg-type]
        self.events: list[Event] = []

    def _hear(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, Started):
                self.prompt.started(event)

    async def read(self, first: int, ended: Any = None) -> Prompt:
        version: Any = SimpleNamespace(
            config=SimpleNamespace(max_positions=1000), model=Model(), scope=SCOPE, lower=(), salted=lambda salt: SCOPE
        )
        asked = ticket([first] * TOKENS, 1)
        self.prompt = Prompt(self.core, self.tier, asked, version, Deadline.after(30), handoff=False)
        self.events.clear()
        self.prompt.submit()
        await self.prompt.admitted(ended or self.core._loop.create_future())
        await self.prompt.fill()
        await until(lambda: any(isinstance(event, Ended) for event in self.events))
        assert any(isinstance(event, Produced) for event in self.events)
        self.prompt.read()
        await self.core.discard(self.prompt.sequence)
        return self.prompt


@asynccontextmanager
async def reader(ring: Ring, nodes: int) -> AsyncIterator[Reader]:
    made = Reader(ring, nodes)
    async with made.core, made.tier:
        yield made


async def test_where_no_node_is_there_it_waits_for_nobody() -> None:
    async with reader(Ring(), 0) as one:
        prompt = await one.read(5)
        assert (prompt.cached, prompt.computed) == (0, TOKENS)


async def test_what_is_in_the_worker_s_own_pages_is_asked_of_nobody() -> None:
    ring = Ring()
    async with reader(ring, 1) as one:
        await one.read(5)
        asked = ring.gets
        prompt = await one.read(5)
        assert (prompt.cached, ring.gets) == (40, asked)


async def test_what_did_not_pay_is_tried_again_at_times() -> None:
    ring = Ring()
    async with reader(ring, 1) as one:
        for number in range(1, 41):
            one.tier.rates.missed(1.0)
            one.tier.rates.computed(1000, 0.001)
            await one.read(number)
        assert 1 <= ring.gets <= 3
