"""Cache nodes without a bus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from pdbus.errors import PdbusError
from pdbus.peers.cache_prefix import PrefixRead


class Ring:
    """Cache nodes in memory, as CacheRing shows them."""

    def __init__(self, *, full: bool = False) -> None:
        self.entries: dict[bytes, tuple[bytes, bytes, bytes]] = {}
        self.puts = self.gets = self.broken = 0
        self._full = full
        self.stops_at = -1
        """The part that doesn't come any more."""
        self.gate: Callable[[int], Awaitable[None]] = _open
        """Awaited before each part."""

    async def read_prefix(
        self, keys: Any, root: bytes, materials: Any, into: PrefixRead, ctx: Any, *, within_s: float
    ) -> int:
        """Part by part, two values at a time, as nodes send them."""
        self.gets += 1
        entries = [self.entries.get(key) for key in keys]
        known = zip(entries, materials, strict=True)
        values = [
            entry[2] for entry, _ in takewhile(lambda one: one[0] and one[0][:2] == (root, one[1]), known) if entry
        ]
        into.ask(1)
        into.promise(range(len(values)))
        try:
            for part in range(into.parts if values else 0):
                if part == self.stops_at:
                    return into.whole
                await self.gate(part)
                size = len(values[0]) // into.parts
                for at in range(0, len(values), 2):
                    run = [value[part * size : (part + 1) * size] for value in values[at : at + 2]]
                    into.take(range(at, at + len(run)), part, 1, b"".join(run))
        except PdbusError:
            self.broken += 1
        return into.whole

    async def write(
        self, kind: str, key: bytes, root: bytes, material: bytes, value: Any, ctx: Any, *, ttl_s: float
    ) -> bool:
        if self._full:
            return False
        self.puts += 1
        self.entries[key] = (root, material, bytes(value))
        return True


async def _open(part: int) -> None:
    """Nothing holds it up."""


def fleet_of(nodes: int) -> Any:
    """A fleet that knows so many cache nodes."""
    return SimpleNamespace(live=lambda service: ("node",) * nodes)
