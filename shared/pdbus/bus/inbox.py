"""Replies: one wildcard subscription per process, and a token for each call in flight."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdbus.bus.headers import CALLER_GONE
from pdbus.bus.transport import Raw, Subscription, Transport
from pdbus.errors import Unavailable

Receiver = Callable[[Raw], None]


class Inbox:
    """Hands replies to whoever opened their subject. Tells stream senders when nobody has it open any more."""

    def __init__(self, transport: Transport, owner: str) -> None:
        self._transport = transport
        self._prefix = f"{transport.inbox_prefix}.{owner}."
        self._tokens = itertools.count(1)
        self._open: dict[str, Receiver] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._transport.subscribe(f"{self._prefix}*", self._on_reply)

    async def stop(self) -> None:
        if self._subscription:
            await self._subscription.close()

    @contextmanager
    def open(self, receiver: Receiver) -> Iterator[str]:
        """A reply subject of its own, for as long as the scope lasts."""
        subject = f"{self._prefix}{next(self._tokens):x}"
        self._open[subject] = receiver
        try:
            yield subject
        finally:
            del self._open[subject]

    def _on_reply(self, raw: Raw) -> None:
        receiver = self._open.get(raw.subject)
        if receiver:
            receiver(raw)
        elif raw.reply:
            self.refuse(raw.reply)

    def refuse(self, reply: str) -> None:
        """Tells the sender of a stream that its frames have no reader."""
        try:
            self._transport.send(reply, headers=CALLER_GONE)
        except Unavailable:
            return  # its next frame brings us here again
