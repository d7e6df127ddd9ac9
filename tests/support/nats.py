"""Pairs of buses that show the same behaviour on it and on the in-memory twin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pdbus.bus.bus import Bus, connect, memory_bus
from pdbus.bus.memory import MemoryBroker


@dataclass(frozen=True)
class BusPair:
    """Two processes on one broker. `kind` is "twin" or "real"."""

    kind: str
    server: Bus
    client: Bus


@asynccontextmanager
async def twin_pair() -> AsyncIterator[BusPair]:
    broker = MemoryBroker()
    async with memory_bus(broker) as server, memory_bus(broker) as client:
        yield BusPair("twin", server, client)


@asynccontextmanager
async def real_pair(url: str) -> AsyncIterator[BusPair]:
    async with connect(url, name="test-server") as server, connect(url, name="test-client") as client:
        yield BusPair("real", server, client)
