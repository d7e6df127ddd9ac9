"""No retry storm: many clients of a router that refuses everything ask it hardly more often than there are requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from pdbus.bus.bus import connect as connect_bus
from pdbus.client import connect
from pdbus.context import RequestContext
from pdbus.errors import DeadlineExceeded, Overloaded
from pdbus.messages.router import InferReply, InferRequest
from pdbus.subjects import INFER

REQUESTS, TIMEOUT_S = 150, 1.5
PER_S, AT_ONCE, SHARE = 2.0, 20.0, 0.2
"""Of the client's budget."""


async def test_an_overloaded_router_is_not_asked_many_times_as_much(nats_url: str) -> None:
    asked = 0

    async def refuse(request: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        nonlocal asked
        asked += 1
        raise Overloaded("full", retry_after_s=0.05)
        yield  # pragma: no cover

    async with connect_bus(nats_url, name="router") as bus, connect(nats_url, "m", timeout_s=TIMEOUT_S) as client:
        served = await bus.serve(INFER(model="m"), refuse, limit=REQUESTS)
        begun = time.monotonic()
        answers = await asyncio.gather(*(client.complete("x") for _ in range(REQUESTS)), return_exceptions=True)
        took_s = time.monotonic() - begun  # more than the deadline on a busy machine
        await served.close()
    assert all(isinstance(answer, Overloaded | DeadlineExceeded) for answer in answers)
    assert REQUESTS < asked <= REQUESTS * (1 + SHARE) + AT_ONCE + PER_S * took_s + 1
