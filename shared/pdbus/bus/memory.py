"""The in-memory twin of a NATS server: same rules for wildcards, queue groups, no responders and payload size."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdbus.buffer import Buffer
from pdbus.bus.nats_wire import check_target
from pdbus.bus.transport import NO_HEADERS, NO_RESPONDERS, STATUS, Callback, Raw
from pdbus.errors import TooLarge
from pdbus.nats_access import OPEN_INBOX

log = logging.getLogger(__name__)


def matches(pattern: str, subject: str) -> bool:
    """Whether a subscription to `pattern` gets messages of `subject`: `*` is one token, a final `>` one or more."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class MemorySubscription:
    broker: MemoryBroker
    subject: str
    queue: str
    callback: Callback

    async def close(self) -> None:
        self.broker.subscriptions.discard(self)
        await asyncio.sleep(0)  # deliveries that are already scheduled come first


class MemoryBroker:
    """Shared by the buses of one event loop. Delivery is asynchronous and in order, as over a socket."""

    def __init__(self, max_payload: int = 1 << 20) -> None:
        self.max_payload = max_payload
        self.subscriptions: set[MemorySubscription] = set()

    def deliver(self, raw: Raw) -> int:
        """Schedules `raw` for everyone interested, one member of each queue group. Returns how many get it."""
        groups: defaultdict[str, list[MemorySubscription]] = defaultdict(list)
        for subscription in self.subscriptions:
            if matches(subscription.subject, raw.subject):
                groups[subscription.queue].append(subscription)
        chosen = groups.pop("", []) + [random.choice(members) for members in groups.values()]  # noqa: S311
        loop = asyncio.get_running_loop()
        for subscription in chosen:
            loop.call_soon(self._call, subscription, raw)
        return len(chosen)

    def _call(self, subscription: MemorySubscription, raw: Raw) -> None:
        try:
            subscription.callback(raw)
        except Exception:
            log.exception("a subscriber of %s failed", subscription.subject)


class MemoryTransport:
    """One connection to a MemoryBroker."""

    connected = True
    inbox_prefix = OPEN_INBOX

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    @property
    def max_payload(self) -> int:
        return self._broker.max_payload

    def send(self, subject: str, *parts: Buffer, reply: str = "", headers: Mapping[str, str] = NO_HEADERS) -> None:
        check_target(subject, reply)
        size = sum(map(len, parts)) + sum(len(name) + len(value) + 4 for name, value in headers.items())
        if size > self.max_payload:
            raise TooLarge(f"a message of {size} bytes to {subject}; the server takes {self.max_payload}")
        raw = Raw(subject, reply, {name.lower(): value for name, value in headers.items()}, b"".join(parts))
        if not self._broker.deliver(raw) and reply:
            self._broker.deliver(Raw(reply, "", {STATUS: NO_RESPONDERS, "nats-subject": subject}, b""))

    async def writable(self) -> None:
        await asyncio.sleep(0)

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> MemorySubscription:
        subscription = MemorySubscription(self._broker, subject, queue, callback)
        self._broker.subscriptions.add(subscription)
        return subscription

    async def barrier(self) -> None:
        await asyncio.sleep(0)

    async def ready(self) -> None:
        return

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Memory does not break."""

    def on_refused(self, callback: Callable[[str], None]) -> None:
        """It refuses nothing."""
