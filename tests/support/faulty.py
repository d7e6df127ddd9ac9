"""A transport that loses, doubles, reorders and damages what is sent over it, as told by a random generator's seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdbus.buffer import Buffer
from pdbus.bus.transport import NO_HEADERS, Callback, Subscription, Transport


@dataclass
class FaultyTransport:
    """Chances are per message; `most_faults` bounds them, so that every transfer can end."""

    inner: Transport
    seed: int = 0
    lose: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    damage: float = 0.0
    most_faults: int = 10**9
    faults: int = 0
    sent: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def max_payload(self) -> int:
        return self.inner.max_payload

    @property
    def inbox_prefix(self) -> str:
        return self.inner.inbox_prefix

    @property
    def connected(self) -> bool:
        return self.inner.connected

    def send(self, subject: str, *parts: Buffer, reply: str = "", headers: Mapping[str, str] = NO_HEADERS) -> None:
        self.sent.append(subject)
        body = b"".join(parts)
        if self._strikes(self.lose):
            return
        if self._strikes(self.damage) and body:
            at = self._random.randrange(len(body))
            body = body[:at] + bytes([body[at] ^ 0xFF]) + body[at + 1 :]
        if self._strikes(self.double):
            self.inner.send(subject, body, reply=reply, headers=headers)
        if self._strikes(self.delay):
            loop = asyncio.get_running_loop()
            wait_s = self._random.uniform(0, 0.005)
            loop.call_later(wait_s, lambda: self.inner.send(subject, body, reply=reply, headers=headers))
        else:
            self.inner.send(subject, body, reply=reply, headers=headers)

    def _strikes(self, chance: float) -> bool:
        if self.faults >= self.most_faults or self._random.random() >= chance:
            return False
        self.faults += 1
        return True

    async def writable(self) -> None:
        await self.inner.writable()

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> Subscription:
        return await self.inner.subscribe(subject, callback, queue)

    async def barrier(self) -> None:
        await self.inner.barrier()

    async def ready(self) -> None:
        await self.inner.ready()

    def on_lost(self, callback: Callable[[], None]) -> None:
        self.inner.on_lost(callback)

    def on_refused(self, callback: Callable[[str], None]) -> None:
        self.inner.on_refused(callback)
