"""How much of a log each tenant has, as its messages are stored, replaced and expire. Pure: times are passed in.

All that a tenant stored within the same ten minutes expires together, so what is remembered does not grow with the
number of its messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

STEP_S: Final = 600


@dataclass(slots=True)
class _Tenant:
    total: int = 0
    steps: dict[int, dict[str, int]] = field(default_factory=dict)
    """By the time of storing, and then by name."""
    reserved: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By name: when, and how much. The oldest first."""


class DiskUse:
    def __init__(self, kept_s: float) -> None:
        """`kept_s`: after that time a message is gone."""
        self._kept_s = kept_s
        self._tenants: dict[str, _Tenant] = {}

    def stored(self, tenant: str, name: str, size: int, at_s: float, *, replaces: bool = False) -> None:
        """`name`: of what later messages may replace."""
        known, step = self._tenants.setdefault(tenant, _Tenant()), int(at_s // STEP_S)
        if step not in known.steps:
            self._forget(known, at_s)
        if replaces:
            known.total -= sum(sizes.pop(name, 0) for sizes in known.steps.values())
        sizes = known.steps.setdefault(step, {})
        sizes[name] = sizes.get(name, 0) + size
        known.total += size

    def reserve(self, tenant: str, name: str, size: int, at_s: float) -> None:
        """Instead of what was reserved under that name before; 0: nothing any more."""
        known = self._tenants.setdefault(tenant, _Tenant())
        known.total -= known.reserved.pop(name, (0, 0))[1]
        if size:
            known.reserved[name] = int(at_s // STEP_S), size
            known.total += size

    def used(self, tenant: str, now_s: float) -> int:
        known = self._tenants.get(tenant)
        if known is None:
            return 0
        self._forget(known, now_s)
        return known.total

    def expiring(self, tenant: str, now_s: float) -> list[tuple[float, int]]:
        """In how many seconds how much of it will be gone by itself, the next first."""
        known = self._tenants.get(tenant, _Tenant())
        steps = ((step, sum(sizes.values())) for step, sizes in sorted(known.steps.items()))
        return [((step + 1) * STEP_S + self._kept_s - now_s, size) for step, size in steps]

    def _forget(self, known: _Tenant, now_s: float) -> None:
        """What is gone by then: also of tenants whom nobody here asks about."""
        gone = int((now_s - self._kept_s) // STEP_S) - 1  # the last step of which nothing is there any more
        for step in [step for step in known.steps if step <= gone]:
            known.total -= sum(known.steps.pop(step).values())
        while known.reserved and (oldest := next(iter(known.reserved.items())))[1][0] <= gone:
            known.total -= known.reserved.pop(oldest[0])[1]
