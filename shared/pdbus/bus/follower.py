"""Following a log: a cursor that asks for the next entry, woken by the live copy of each new one."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdbus.bus.codec import decode
from pdbus.bus.instruments import Instruments
from pdbus.bus.jetstream import JetStream
from pdbus.bus.nats import NatsSubscription, NatsTransport
from pdbus.bus.transport import Raw
from pdbus.errors import Corrupt, InvalidRequest, NotFound, Unavailable
from pdbus.subjects import Log, ToEvent

log = logging.getLogger(__name__)
Q = TypeVar("Q")

POLL_S = 1.0
"""So old the confirmation of being at the end gets, at most, while the server answers."""
RETRY_S = 0.25
_SOON_S, _LATER = 0.005, 4.0
"""A live copy may come before the log has stored its entry: then that is looked for after so long, and after so many
times as long each time that it still isn't there."""


@dataclass(frozen=True, slots=True)
class Record(Generic[Q]):
    seq: int
    time_ns: int
    """When the server stored it, wall clock."""
    entry: Q


class Follower(Generic[Q]):
    """An asynchronous iterator over the records after a sequence, in order; it never ends by itself.

    Raises Corrupt when the log was made anew, so that what was read before means nothing. An entry that can't be read
    is counted, logged and passed over. Use as a context manager, or `aclose()` it."""

    def __init__(
        self,
        to: ToEvent[Q],
        subject: Log[Q],
        after: int,
        transport: NatsTransport,
        js: JetStream,
        instruments: Instruments,
        born: str = "",
    ) -> None:
        self.seq = after
        """Of the last record given out, or passed over."""
        self.born = born
        """When the log was made; empty until that is known."""
        self.confirmed_at = float("-inf")
        """Monotonic time at which the log was known to hold nothing beyond `seq`."""
        self._to = to
        self._subject = subject
        self._transport = transport
        self._js = js
        self._instruments = instruments
        self._subscription: NatsSubscription | None = None
        self._checked_at = float("-inf")
        self._news = asyncio.Event()
        self._down = False
        self._closed = False

    async def __aenter__(self) -> Follower[Q]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def closed(self) -> bool:
        return self._closed

    async def aclose(self) -> None:
        self._closed = True
        if self._subscription:
            await self._subscription.close()

    def __aiter__(self) -> Follower[Q]:
        return self

    async def __anext__(self) -> Record[Q]:
        if self._subscription is None:
            self._subscription = await self._transport.subscribe(self._to.name, self._on_live_copy)
        again_s = POLL_S
        while True:
            again_s = _SOON_S if self._news.is_set() else min(_LATER * again_s, POLL_S)
            self._news.clear()
            try:
                record = await self._fetch()
            except Unavailable as error:
                if not self._down:
                    log.warning("the log %s can't be read: %s", self._to.name, error.message)
                self._down = True
                await asyncio.sleep(RETRY_S)
                continue
            if self._down:
                log.warning("the log %s can be read again", self._to.name)
                self._down = False
            if record:
                return record
            with suppress(TimeoutError):
                async with asyncio.timeout(again_s):
                    await self._news.wait()

    def _on_live_copy(self, _: Raw) -> None:
        """The content is not used: it is not known yet whether the log took it."""
        self._news.set()

    async def _fetch(self) -> Record[Q] | None:
        """The next readable record; None when there is none, which is then confirmed."""
        while True:
            await self._check_same_log()
            asked_at = time.monotonic()
            try:
                stored = await self._js.next(self._subject.stream, self._to.name, self.seq + 1)
            except NotFound:
                raise Corrupt(f"the log {self._to.name} is gone") from None
            if stored is None:
                self.confirmed_at = asked_at
                return None
            self.seq = stored.seq
            try:
                return Record(stored.seq, stored.time_ns, decode(self._subject.message, stored.data))
            except InvalidRequest as error:
                self._instruments.malformed(f"{self._to.name} (entry {stored.seq})", error.message)

    async def _check_same_log(self) -> None:
        """A log that was made anew has another date of birth, or ends before the cursor."""
        if time.monotonic() - self._checked_at < POLL_S:
            return
        try:
            state = await self._js.state(self._subject.stream)
        except NotFound:
            raise Corrupt(f"the log {self._to.name} is gone") from None
        self.born = self.born or state.created
        if state.created != self.born or state.last_seq < self.seq:
            raise Corrupt(f"the log {self._to.name} was made anew")
        self._checked_at = time.monotonic()
