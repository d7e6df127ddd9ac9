"""Slots by tenant, of those that are at work. Pure."""

from __future__ import annotations

from collections import Counter

from pdbus.floods import most_beside


class Held:
    def __init__(self) -> None:
        self.total = 0
        self._by_tenant: Counter[str] = Counter()

    def of(self, tenant: str) -> int:
        return self._by_tenant[tenant]

    def add(self, tenant: str, slots: int) -> None:
        """Below 0: it gives them back."""
        self.total += slots
        self._by_tenant[tenant] += slots
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def beside_flood(self, tenant: str, slots: int) -> bool:
        """Whether another tenant would flood it, had it so many more."""
        most = most_beside(self.of(tenant) + slots)
        return any(held > most for held in self._by_tenant.values())

    def tenants(self, tenant: str) -> int:
        """How many share all there is, this one among them."""
        return len(self._by_tenant.keys() | {tenant})
