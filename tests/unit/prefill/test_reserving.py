"""A prefill worker whose decode worker has no pages asks again, in simulated seconds."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.context import RequestContext
from pdbus.errors import Conflict, Overloaded
from pdbus.kv.format import PageFormat
from pdbus.kv.pages import PageTable
from pdbus.messages.decode import Lease, Reserve
from pdbus.prefill.handoff import Handoff, Reserving
from pdbus.subjects import DECODE_RESERVE
from tests.support.sequences import sequence
from tests.support.simulated_time import simulated

FORMAT = PageFormat(layers=3, kv_heads=1, head_dim=16, dtype="int8", layout="kv3")
FULL_S = 5.0


@pytest.mark.parametrize(
    ("interrupted", "count", "most_asked", "soon_s"),
    [(True, 1, 400, 0.05), (True, 60, 60 * 40, 0.3), (False, 1, 50, 2.0)],
    ids=["one that is interrupted", "many", "a new one"],
)
def test_an_interrupted_answer_is_there_when_there_is_room(
    interrupted: bool, count: int, most_asked: int, soon_s: float
) -> None:
    """Also where there are many, which are no burden then. Others ask ever more rarely."""

    async def asked() -> tuple[int, float]:
        async with memory_bus(MemoryBroker()) as bus:
            begun, asked_s = time.monotonic(), list[float]()

            async def reserve(message: Reserve, ctx: RequestContext) -> Lease:
                assert message.interrupted == interrupted
                asked_s.append(time.monotonic() - begun)
                if asked_s[-1] < FULL_S:
                    raise Overloaded("no pages")
                raise Conflict("that was all")

            await bus.serve(DECODE_RESERVE(worker="d"), reserve)
            pool, versions = SimpleNamespace(format=FORMAT), SimpleNamespace(compute_class="c")
            reserving = Reserving()
            worker: Any = SimpleNamespace(
                id="p", bus=bus, pool=pool, versions=versions, cores=None, reserving=reserving
            )
            handoffs = []
            for _ in range(count):
                one = sequence(PageTable(4), [1] * 3)
                one.ticket = replace(one.ticket, delivered=(7,) if interrupted else ())
                handoffs.append(Handoff(worker, one, "d").run())
            ends = await asyncio.gather(*handoffs, return_exceptions=True)
            assert {type(end) for end in ends} == {Conflict}
            assert reserving.interrupted == 0
            return len(asked_s), asked_s[-1]

    times, last_s = simulated(asked)
    assert times <= most_asked
    assert last_s <= FULL_S + soon_s
