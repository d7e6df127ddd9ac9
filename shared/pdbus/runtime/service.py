"""What a service is to the runtime."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar

from pdbus.context import Deadline
from pdbus.messages.presence import Card, Load
from pdbus.settings import Settings

if TYPE_CHECKING:
    from pdbus.bus.bus import Bus

S = TypeVar("S", bound=Settings)


class Service(ABC, Generic[S]):
    """One process's service. The runtime calls, all in one task of the event loop:

    1. `__init__(settings, bus)`: builds, starts nothing. From here on `load()` and `card()` are called every 0.5 s,
       and `held()` and `kept()` whenever somebody asks.
    2. `__aenter__`: starts; may take long. The process's card says "starting", with the detail that `card()` adds. A
       start that raises or is cancelled (SIGTERM) has to release what it made by then: `__aexit__` is not called.
    3. The card says "ready" until SIGTERM, SIGINT, the loss of the launcher, or `fail()`.
    4. `stop_intake()`, `drain(deadline)` (skipped after `fail()`), `__aexit__`: the card says "draining".
    """

    name: ClassVar[str]
    """As in presence subjects and in the stock `nats micro` list: "router", "prefill", …"""

    def __init__(self, settings: S, bus: Bus) -> None:
        self.settings = settings
        self.bus = bus
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self.changed = asyncio.Event()
        """Set by the service when others wait for what its card says now: it is published at once."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def load(self) -> Load:
        """What the process holds right now; quick."""
        return Load()

    @property
    def moved(self) -> int:
        """Requests under way that were handed over to another process since the start."""
        return 0

    def card(self, card: Card) -> Card:
        """Adds what only the service knows (roots, url, compute class, page format, detail, progress); quick.

        A service that is up but can't serve yet may set `state` back to "starting"."""
        return card

    def held(self) -> dict[str, int]:
        """Counts of what it holds for work in hand, by name: all 0 once there is none. Quick."""
        return {}

    def kept(self) -> dict[str, int]:
        """Counts and bytes of what stays without work, by name, each within a bound. Quick."""
        return {}

    async def stop_intake(self) -> None:
        """Takes nothing new any more. New requests are refused retryably, so that their callers go elsewhere."""

    async def drain(self, deadline: Deadline) -> None:
        """Returns when all running work is done or handed over; is cancelled when `deadline` passes."""

    def fail(self, error: BaseException) -> None:
        """The service can't go on (its engine thread died, say): the process stops with exit code 1, to be restarted.

        Call it in the event loop; from another thread by `loop.call_soon_threadsafe`."""
        self.failure = self.failure or error
        self.failed.set()
