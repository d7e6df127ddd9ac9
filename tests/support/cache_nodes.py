"""Cache nodes on the in-memory twin: all of a node but the log of invalidations, which needs a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pdbus.bus.bus import Bus, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.bus.presence import Presence
from pdbus.cache.disk_tier import DiskTier
from pdbus.cache.handlers import Handlers
from pdbus.cache.transfers import Transfers
from pdbus.caching.disk import DiskStore
from pdbus.caching.store import Store
from pdbus.errors import PdbusError
from pdbus.messages.presence import Card, State
from pdbus.subjects import CACHE_DELETE, CACHE_GET, CACHE_PUT, CACHE_SCAN


@dataclass
class Node:
    name: str
    bus: Bus
    store: Store
    transfers: Transfers
    handlers: Handlers
    disk: DiskTier | None = None
    refuses: PdbusError | None = None
    hangs: bool = False
    state: State = "ready"
    calls: list[object] = field(default_factory=list)
    """Everything that it was asked."""

    def card(self, seq: int) -> Card:
        return Card("cache", self.name, self.bus.incarnation, seq, self.state, "m")


@asynccontextmanager
async def cache_node(
    broker: MemoryBroker,
    name: str,
    budget_bytes: int = 64 << 20,
    folder: Path | None = None,
    disk_bytes: int = 64 << 20,
) -> AsyncIterator[Node]:
    """A served node with a presence card; set `refuses` or `hangs` to make it so. `folder`: of its disk tier."""
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(memory_bus(broker))
        disk = None
        if folder:
            files = DiskStore(folder, disk_bytes, 10_000, time.time() - time.monotonic())
            disk = await stack.enter_async_context(DiskTier(files))
        store = Store(budget_bytes, bus.incarnation, disk)
        transfers = Transfers(bus, budget_bytes)

        def check() -> None:
            if node.refuses:
                raise node.refuses

        handlers = Handlers(name, bus, store, transfers, 3600.0, check, disk)
        node = Node(name, bus, store, transfers, handlers, disk)

        async def get(message, ctx):
            node.calls.append(message)
            if node.hangs:
                await asyncio.Event().wait()
            return await handlers.get(message, ctx)

        for subject, handler in (
            (CACHE_GET, get),
            (CACHE_PUT, handlers.put),
            (CACHE_DELETE, handlers.delete),
            (CACHE_SCAN, handlers.scan),
        ):
            await stack.enter_async_context(await bus.serve(subject(node=name), handler))
        stack.push_async_callback(transfers.close)
        await stack.enter_async_context(Presence(bus, node.card))
        yield node
