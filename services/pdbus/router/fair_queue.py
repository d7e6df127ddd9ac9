"""Who of those that wait is next: the highest priority first, and within a priority fair by tenant. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each tenant's first waiting entry has a tag, and the least tag is
next; a tenant's tag moves on by the cost of what it got. So between two tenants that both wait all the time the served
costs differ by less than the two largest entries, and a tenant that begins to ask comes next, whatever others have
queued. A priority that was passed over `PATIENCE` times running goes first once, so that none starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

PATIENCE = 16


@dataclass(eq=False, slots=True)
class Entry(Generic[T]):
    """One that waits."""

    tenant: str
    priority: int
    cost: float
    """Above 0."""
    item: T


@dataclass(eq=False, slots=True)
class _Flow(Generic[T]):
    """One tenant's entries within a priority."""

    tag: float
    """Start tag of the first one."""
    entries: deque[Entry[T]] = field(default_factory=deque)
    cost: float = 0.0
    """Of all of them."""


@dataclass(eq=False, slots=True)
class _Level(Generic[T]):
    """One priority. Holds nothing while nobody waits in it."""

    now: float = 0.0
    """Virtual time: the tag of what was served last."""
    flows: dict[str, _Flow[T]] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)
    """Where the next tag of tenants begins that got more than `now` and wait no more."""
    passed: int = 0
    """Times running that others were served before it."""


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._levels: dict[int, _Level[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry[T]]:
        """All, in no order."""
        return (one for level in self._levels.values() for flow in level.flows.values() for one in flow.entries)

    def push(self, entry: Entry[T]) -> None:
        level = self._levels.setdefault(entry.priority, _Level())
        flow = level.flows.get(entry.tenant)
        if flow is None:
            flow = level.flows[entry.tenant] = _Flow(_tag(level, entry.tenant))
        flow.entries.append(entry)
        flow.cost += entry.cost
        self._count += 1

    def remove(self, entry: Entry[T]) -> bool:
        """It waits no more, and got nothing; False where it isn't here."""
        level = self._levels.get(entry.priority)
        flow = level.flows.get(entry.tenant) if level else None
        if level is None or flow is None or entry not in flow.entries:
            return False
        self._take(level, flow, entry)
        return True

    def in_order(self) -> Iterator[Entry[T]]:
        """The first one of each tenant and priority, as they should be served. To be begun anew after any change."""
        for priority in sorted(self._levels, key=lambda p: (self._levels[p].passed < PATIENCE, -p)):
            flows = self._levels[priority].flows.values()
            yield from (flow.entries[0] for flow in sorted(flows, key=lambda flow: flow.tag))

    def serve(self, entry: Entry[T]) -> None:
        """It is one of `in_order`, and gets its turn."""
        level = self._levels[entry.priority]
        flow = level.flows[entry.tenant]
        for priority, other in self._levels.items():
            other.passed = 0 if priority == entry.priority else other.passed + 1
        level.now = max(level.now, flow.tag)
        flow.tag += entry.cost
        level.done[entry.tenant] = flow.tag
        level.done = {tenant: tag for tenant, tag in level.done.items() if tag > level.now}
        self._take(level, flow, entry)

    def ahead(self, tenant: str, priority: int) -> float:
        """The cost of those that would be served before one that came now."""
        higher = [level for own, level in self._levels.items() if own > priority]
        cost = sum(flow.cost for level in higher for flow in level.flows.values())
        level = self._levels.get(priority)
        if level is None:
            return cost
        own = level.flows.get(tenant)
        tag = own.tag + own.cost if own else _tag(level, tenant)
        cost += own.cost if own else 0.0
        others = (flow for name, flow in level.flows.items() if name != tenant and flow.tag <= tag)
        return cost + sum(min(flow.cost, tag - flow.tag + flow.entries[0].cost) for flow in others)

    def last(self) -> Entry[T]:
        """Who goes where not all can wait: of the lowest priority, of the tenant with most waiting, the newest."""
        flows = self._levels[min(self._levels)].flows.values()
        return max(flows, key=lambda flow: len(flow.entries)).entries[-1]

    def _take(self, level: _Level[T], flow: _Flow[T], entry: Entry[T]) -> None:
        flow.entries.remove(entry)
        flow.cost -= entry.cost
        self._count -= 1
        if not flow.entries:
            del level.flows[entry.tenant]
        if not level.flows:
            # Nobody is behind anybody any more: all begin alike.
            del self._levels[entry.priority]


def _tag(level: _Level[T], tenant: str) -> float:
    return max(level.now, level.done.get(tenant, 0.0))
