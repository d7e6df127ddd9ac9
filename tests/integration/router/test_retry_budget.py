"""No retry storm: many clients of a router that refuses everything ask it hardly more often than there are requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.client import Client
from pdbus.context import RequestContext
from pdbus.errors import DeadlineExceeded, Overloaded
from pdbus.messages.router import InferReply, InferRequest
from pdbus.subjects import INFER
from tests.support.simulated_time import simulated

REQUESTS, TIMEOUT_S = 150, 1.5
PER_S, AT_ONCE, SHARE = 2.0, 20.0, 0.2
"""Of the client's budget."""


def test_an_overloaded_router_is_not_asked_many_times_as_much() -> None:
    """In simulated seconds."""
    asked, answers = simulated(_asked)
    assert all(isinstance(answer, Overloaded | DeadlineExceeded) for answer in answers)
    assert REQUESTS < asked <= REQUESTS * (1 + SHARE) + AT_ONCE + PER_S * TIMEOUT_S + 1


async def _asked() -> tuple[int, list[object]]:
    """How often the router was asked, and what became of the requests."""
    asked, broker = 0, MemoryBroker()

    async def refuse(request: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        nonlocal asked
        asked += 1
        raise Overloaded("full", retry_after_s=0.05)
        yield  # pragma: no cover

    async with memory_bus(broker) as bus, memory_bus(broker) as own:
        client = Client(own, "m", timeout_s=TIMEOUT_S)
        async with await bus.serve(INFER(model="m"), refuse, limit=REQUESTS):
            answers = await asyncio.gather(*(client.complete("x") for _ in range(REQUESTS)), return_exceptions=True)
    return asked, list(answers)
