"""Deadlines and the context of one request, as every hop passes them on."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field, replace

from pdbus.errors import DeadlineExceeded

DEFAULT_PRIORITY = 5
HIGHEST_PRIORITY = 9
"""Of requests, from 0."""

LONGEST_DEADLINE_S = 600.0
"""No request may live longer; roots stay fetchable and second deletes wait for this long."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """An absolute moment, kept on the monotonic clock of this process.

    On the wire it is two numbers: wall-clock nanoseconds, and the budget in ms that was left at sending. The receiver
    takes the smaller of the two, so that neither a skewed clock nor a slow hop makes it longer.
    """

    at_monotonic_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + min(seconds, LONGEST_DEADLINE_S))

    @classmethod
    def from_wire(cls, wall_ns: int, budget_ms: float | None = None) -> Deadline:
        left_s = (wall_ns - time.time_ns()) / 1e9
        if budget_ms is not None:
            left_s = min(left_s, budget_ms / 1e3)
        return cls.after(left_s)

    @property
    def wall_ns(self) -> int:
        return time.time_ns() + int(self.remaining_s * 1e9)

    @property
    def remaining_s(self) -> float:
        """Seconds left; negative once it has passed."""
        return self.at_monotonic_s - time.monotonic()

    @property
    def passed(self) -> bool:
        return self.remaining_s <= 0

    def within(self, seconds: float) -> Deadline:
        """The earlier of this deadline and `seconds` from now."""
        return Deadline(min(self.at_monotonic_s, time.monotonic() + seconds))

    def check(self, doing: str) -> None:
        if self.passed:
            raise DeadlineExceeded(f"the deadline passed before {doing}")

    def timeout(self) -> asyncio.Timeout:
        """An `async with` scope that raises TimeoutError when the deadline passes."""
        return asyncio.timeout(max(self.remaining_s, 0.0))


def new_id() -> str:
    """A random id, safe as a subject token: 128 bits in hex."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What travels in headers beside every Rpc: who asks, and until when. The trace context is OpenTelemetry's own."""

    deadline: Deadline
    request_id: str = field(default_factory=new_id)
    tenant: str = "anonymous"
    api_key: str | None = field(default=None, repr=False)
    """Only from a caller to a router, which takes it off: between services the tenant counts."""
    priority: int = DEFAULT_PRIORITY
    """Asked for by a caller; a router limits it to what the key may have."""

    @classmethod
    def after(cls, seconds: float) -> RequestContext:
        return cls(Deadline.after(seconds))

    def within(self, seconds: float) -> RequestContext:
        return replace(self, deadline=self.deadline.within(seconds))
