"""When KV leaves for the decode worker: while the rest is computed, or after the first token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pdbus.bus.bus import Bus, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.context import Deadline, RequestContext
from pdbus.engine.sequence import LayerReady, Sequence
from pdbus.kv.format import PageFormat
from pdbus.messages.bulk import KV_FINAL, KvHead
from pdbus.messages.common import Sampling, Ticket
from pdbus.messages.decode import Lease, Reserve
from pdbus.messages.router import TokenItem
from pdbus.model.native_pool import NativePool
from pdbus.native.cores import SharedCores
from pdbus.prefill.handoff import Handoff, Reserving
from pdbus.subjects import ANY, DECODE_RESERVE, KV

FORMAT = PageFormat(layers=3, kv_heads=1, head_dim=16, dtype="int8", layout="kv3")
PAGES = (4, 5, 6, 9)
TOKENS = 64
ROOT = bytes(32)
LIVES_MS = 3_600_000
"""A lease that needs nothing to live."""


class Decode:
    """Grants leases, and keeps what comes: bytes by layer and first token."""

    def __init__(self, bus: Bus, lease: Lease) -> None:
        self._bus, self._lease = bus, lease
        self.layers: dict[tuple[int, int], bytes] = {}
        self.first = asyncio.Event()
        """Something came."""
        self.tasks: list[asyncio.Task[None]] = []

    async def reserve(self, message: Reserve, ctx: RequestContext) -> Lease:
        listening = asyncio.Event()
        self.tasks.append(asyncio.create_task(self._receive(listening)))
        await listening.wait()
        return self._lease

    async def _receive(self, listening: asyncio.Event) -> None:
        async with self._bus.bulk.receive_at(KV.name(worker="d", session="r-0", attempt="1")) as incoming:
            listening.set()
            async for head, body in incoming.items(KvHead, Deadline.after(30)):
                if head.layer != KV_FINAL:
                    size = len(body) // head.layers
                    for at in range(head.layers):
                        self.layers[head.layer + at, head.start] = bytes(body[at * size : (at + 1) * size])
                self.first.set()


@asynccontextmanager
async def handing_over(lease: Lease, cores: SharedCores | None) -> AsyncIterator[tuple[Handoff, Decode, NativePool]]:
    """All of it is sent when the scope ends, after the first token."""
    broker = MemoryBroker()
    pool = NativePool(FORMAT, 12)
    pool.bytes[:] = np.random.default_rng(1).integers(0, 256, pool.bytes.shape, np.uint8)
    deadline = Deadline.after(30)
    tokens, greedy = tuple(range(TOKENS)), Sampling(0.0)
    ticket = Ticket("r", 0, 1, "router", "m", ROOT, "t", b"", tokens, (), greedy, 0, 8, (), deadline.wall_ns)
    hold = SimpleNamespace(pages=PAGES)
    sequence = SimpleNamespace(ticket=ticket, deadline=deadline, hold=hold, interrupted=False)
    async with memory_bus(broker) as here, memory_bus(broker) as there:
        decode = Decode(there, lease)
        await there.bulk.listen(KV.name(worker="d", session=ANY, attempt=ANY))
        versions, reserving = SimpleNamespace(compute_class="any"), Reserving()
        worker: Any = SimpleNamespace(bus=here, pool=pool, id="p", versions=versions, cores=cores, reserving=reserving)
        async with await there.serve(DECODE_RESERVE(worker="d"), decode.reserve):
            handoff = Handoff(worker, cast(Sequence, sequence), "d")
            running = asyncio.create_task(handoff.run())
            handoff.cached(0)
            for layer in range(FORMAT.layers):
                handoff.layer_ready(LayerReady(cast(Sequence, sequence), layer, 0, 48))
            yield handoff, decode, pool
            for layer in range(FORMAT.layers):
                handoff.layer_ready(LayerReady(cast(Sequence, sequence), layer, 48, 16))
            handoff.first_token(TokenItem("r", 0, 1, ROOT, 0, (5,)))
            await running
            await asyncio.gather(*decode.tasks)
    for layer in range(FORMAT.layers):
        assert decode.layers[layer, 0] == pool.bytes[layer, 4:7].tobytes()
        assert decode.layers[layer, 48] == pool.bytes[layer, 9].tobytes()


@pytest.mark.parametrize(
    ("told", "cores"),
    [("", None), ("", SharedCores(2, "a")), ("b", SharedCores(2, "a")), ("a", SharedCores(64, "a"))],
    ids=["no ledgers", "only here", "another machine", "cores to spare"],
)
async def test_kv_leaves_while_the_rest_is_computed(told: str, cores: SharedCores | None) -> None:
    async with handing_over(Lease("i", LIVES_MS, told), cores) as (_, decode, _):
        async with asyncio.timeout(30):
            await decode.first.wait()


async def test_on_few_cores_that_both_share_it_leaves_after_the_first_token() -> None:
    async with handing_over(Lease("i", LIVES_MS, "a"), SharedCores(2, "a")) as (_, decode, _):
        for _ in range(200):  # far more turns of the loop than sending takes
            await asyncio.sleep(0)
        assert decode.tasks
        assert not decode.layers


async def test_there_too_the_lease_is_kept_alive() -> None:
    async with handing_over(Lease("i", 60, "a"), SharedCores(2, "a")) as (_, decode, _):
        async with asyncio.timeout(30):
            await decode.first.wait()
        assert decode.layers
