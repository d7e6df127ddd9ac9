"""The tail of a log as it is written: entries pushed by the server as they are stored, for logs that are written fast.

A follower (follower.py) asks for each entry; this lets them come. Order and completeness rest on the consumer's own
count of deliveries: one that is missing, or a server that falls silent, ends the tail, and its owner opens the next
one where it ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Generic, TypeAlias, TypeVar

from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from pdbus.bus.codec import decode
from pdbus.bus.instruments import Instruments
from pdbus.bus.jetstream import JetStream
from pdbus.bus.nats import NatsSubscription, NatsTransport
from pdbus.bus.transport import STATUS, Raw
from pdbus.context import new_id
from pdbus.errors import InvalidRequest, PdbusError, Unavailable
from pdbus.subjects import Log, ToEvent

log = logging.getLogger(__name__)
Q = TypeVar("Q")

Take: TypeAlias = Callable[[int, Q | None], None]
"""Takes the entry of a sequence, None where it can't be read. Called by the connection's reader: while it is at work,
the server waits. What it raises ends the tail, and the entry doesn't count as taken."""

_HEARTBEAT_S = 1.0
_SILENT_S = 3.0
_UNUSED_S = 30.0
_PLAIN, _WITH_DOMAIN = 9, 11
_SEQ, _DELIVERY, STORED_NS = 5, 6, 7


class Tail(Generic[Q]):
    """Entries of one log after a sequence. While entered they come; `lost` returns why they don't any more."""

    headers_only: ClassVar[bool | None] = None

    def __init__(
        self,
        to: ToEvent[Q],
        subject: Log[Q],
        after: int,
        take: Take[Q],
        transport: NatsTransport,
        js: JetStream,
        instruments: Instruments,
    ) -> None:
        self.seq = after
        """Of the last entry taken."""
        self._to, self._subject, self._take = to, subject, take
        self._transport, self._js, self._instruments = transport, js, instruments
        self._inbox = f"{transport.inbox_prefix}.{new_id()}"
        self._subscription: NatsSubscription | None = None
        self._consumer = ""
        self._delivered = 0
        self._signs = 0
        """Of life, from the server."""
        self._ended = asyncio.Event()
        self._over: PdbusError | None = None

    async def __aenter__(self) -> Tail[Q]:
        """Raises NotFound (no such log), Unavailable."""
        config = ConsumerConfig(
            deliver_subject=self._inbox,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self.seq + 1,
            ack_policy=AckPolicy.NONE,
            filter_subject=self._to.name,
            flow_control=True,
            idle_heartbeat=_HEARTBEAT_S,
            inactive_threshold=_UNUSED_S,
            mem_storage=True,
            num_replicas=1,
            headers_only=self.headers_only,
        )
        self._subscription = await self._transport.subscribe(self._inbox, self._on_raw)
        try:
            self._consumer = await self._js.ensure_consumer(self._subject.stream, config)
        except BaseException:
            await self._subscription.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end(Unavailable("the tail was closed"))
        if self._subscription:
            await self._subscription.close()
        with suppress(PdbusError):  # the server drops it by itself once nobody listens
            await self._js.delete_consumer(self._subject.stream, self._consumer)

    @property
    def over(self) -> bool:
        return self._over is not None

    async def lost(self) -> PdbusError:
        """Returns once nothing more can come."""
        while self._over is None:
            before = self._signs
            with suppress(TimeoutError):
                async with asyncio.timeout(_SILENT_S):
                    await self._ended.wait()
            if self._signs == before:
                self._end(Unavailable(f"the log {self._to.name} went silent"))
        return self._over

    def _on_raw(self, raw: Raw) -> None:
        if self._over:
            return
        if STATUS in raw.headers:
            self._on_status(raw)
            return
        try:
            seq, delivery = int(part_of(raw.reply, _SEQ)), int(part_of(raw.reply, _DELIVERY))
        except InvalidRequest:
            self._end(Unavailable(f"the log {self._to.name} was delivered in an unknown way"))
            return
        self._signs += 1
        if delivery != self._delivered + 1:
            self._end(Unavailable(f"entries of {self._to.name} were missed"))
            return
        self._delivered += 1
        self._give(seq, raw)

    def _give(self, seq: int, raw: Raw) -> None:
        try:
            entry = decode(self._subject.message, raw.data)
        except InvalidRequest as error:
            self._instruments.malformed(f"{self._to.name} (entry {seq})", error.message)
            entry = None
        try:
            self._take(seq, entry)
        except PdbusError as error:
            self._end(error)
        except Exception as error:
            self._end(PdbusError(f"an entry of {self._to.name} could not be taken: {error!r}"))
            raise  # the transport logs it
        else:
            self.seq = seq

    def _on_status(self, raw: Raw) -> None:
        """100 is a sign of life, or the wish to know that all until here was taken; else the consumer is gone."""
        if raw.headers[STATUS] != "100":
            self._end(Unavailable(f"the log {self._to.name} is no longer delivered (status {raw.headers[STATUS]})"))
            return
        self._signs += 1
        if int(raw.headers.get("nats-last-consumer", self._delivered)) != self._delivered:
            self._end(Unavailable(f"entries of {self._to.name} were missed"))
            return
        answer = raw.reply or raw.headers.get("nats-consumer-stalled", "")
        if answer:
            with suppress(Unavailable):
                self._transport.send(answer, b"")

    def _end(self, why: PdbusError) -> None:
        self._over = self._over or why
        self._ended.set()


def part_of(reply: str, at: int) -> str:
    """Of an acknowledgement's subject: `_SEQ`, `_DELIVERY` or `STORED_NS`. Raises InvalidRequest where it is none."""
    parts = reply.split(".")
    shift = 0 if len(parts) == _PLAIN else _WITH_DOMAIN - _PLAIN
    if len(parts) < _PLAIN or (shift and len(parts) < _WITH_DOMAIN):
        raise InvalidRequest(f"no acknowledgement subject: {reply[:128]}")
    return parts[at + shift]
