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
from pdbus.errors import Overloaded
from pdbus.kv.format import PageFormat
from pdbus.kv.pages import PageTable
from pdbus.messages.decode import Lease, Reserve
from pdbus.prefill.handoff import Handoff
from pdbus.subjects import DECODE_RESERVE
from tests.support.sequences import sequence
from tests.support.simulated_time import simulated

FORMAT = PageFormat(layers=3, kv_heads=1, head_dim=16, dtype="int8", layout="kv3")
FULL_S = 5.0


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_interrupted_answer_is_there_when_there_is_room(interrupted: bool) -> None:
    """Others ask ever more rarely."""

    async def asked() -> list[float]:
        async with memory_bus(MemoryBroker()) as bus:
            begun, asked_s = time.monotonic(), list[float]()

            async def reserve(message: Reserve, ctx: RequestContext) -> Lease:
                assert message.interrupted == interrupted
                asked_s.append(time.monotonic() - begun)
                if asked_s[-1] < FULL_S:
                    raise Overloaded("no pages")
                raise asyncio.CancelledError  # that was all

            await bus.serve(DECODE_RESERVE(worker="d"), reserve)
            one = sequence(PageTable(4), [1] * 3)
            one.ticket = replace(one.ticket, delivered=(7,) if interrupted else ())
            pool, versions = SimpleNamespace(format=FORMAT), SimpleNamespace(compute_class="c")
            worker: Any = SimpleNamespace(id="p", bus=bus, pool=pool, versions=versions, cores=None)
            with pytest.raises(Exception, match="stopping"):
                await Handoff(worker, one, "d").run()
            return asked_s

    asked_s = simulated(asked)
    if interrupted:
        assert asked_s[-1] < FULL_S + 0.05
        assert len(asked_s) > 100
    else:
        assert len(asked_s) < 50
