"""What a process holds, told on request: for people, and for tests that nothing leaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HoldingsWanted:
    """To one process by name."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Right now, by name."""

    service: str
    id: str
    incarnation: str
    held: Mapping[str, int] = field(default_factory=dict)
    """For work in hand: all of it is 0 once there is none."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """What stays without work, each within a bound: caches, tables, tasks, threads, file descriptors, memory."""

    @property
    def leaked(self) -> dict[str, int]:
        """What an idle process must not hold any more."""
        return {name: count for name, count in self.held.items() if count}
