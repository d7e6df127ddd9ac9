"""Taking from a work queue: one message at a time, kept while it is worked on, settled explicitly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from nats.js.api import AckPolicy, ConsumerConfig

from pdbus.bus.codec import decode
from pdbus.bus.instruments import Instruments
from pdbus.bus.jetstream import JetStream
from pdbus.errors import InvalidRequest, NotFound, PdbusError, Unavailable
from pdbus.subjects import ToEvent, Work

log = logging.getLogger(__name__)
Q = TypeVar("Q")

_KEEPS = 3
"""So often within its `ack_wait_s` a worker says that it is still at work."""
PULL_S = 5.0
RETRY_S = 0.5
_LONGEST_RETRY_S = 4.0
MOST_PENDING = 100_000
"""Messages that may be put off at once."""


class Job(Generic[Q]):
    """A message to be worked on. Until it is settled nobody else gets it, and it comes again if this process dies."""

    def __init__(self, message: Q, reply: str, js: JetStream, ack_wait_s: float) -> None:
        self.message = message
        self.deliveries = deliveries(reply)
        """How often it was given out, this time included."""
        self._reply = reply
        self._js = js
        self._keep_every_s = ack_wait_s / _KEEPS
        self._settled = False
        self._beat = asyncio.get_running_loop().call_later(self._keep_every_s, self._keep)

    async def done(self) -> None:
        """The work's effects are durable: the message is removed. Raises Unavailable; it may then come again."""
        await self._settle(b"+ACK")

    async def later(self, delay_s: float) -> None:
        """Comes again after `delay_s`."""
        await self._settle(b'-NAK {"delay":%d}' % max(int(delay_s * 1e9), 1))

    async def release(self) -> None:
        """Gives an unsettled message back at once; nothing if it is settled."""
        if not self._settled:
            await self._settle(b"-NAK")

    async def _settle(self, verdict: bytes) -> None:
        self._settled = True
        self._beat.cancel()
        await self._js.settle(self._reply, verdict)

    def _keep(self) -> None:
        with suppress(PdbusError):
            self._js.keep(self._reply)
        self._beat = asyncio.get_running_loop().call_later(self._keep_every_s, self._keep)


def deliveries(reply: str) -> int:
    """What the acknowledgement subject says of a message: how often it was given out. Raises InvalidRequest.

    `$JS.ACK.<stream>.<consumer>.<deliveries>.…` of 9 tokens; later servers put domain and account behind `$JS.ACK`."""
    tokens = reply.split(".")
    try:
        return int(tokens[4 if len(tokens) < 11 else 6])
    except (IndexError, ValueError):
        raise InvalidRequest(f"no acknowledgement subject: {reply[:128]}") from None


class Consumer:
    """The server's side of a queue, for all of this process that take from it: they ask for it one at a time. Each
    asking is a write to the server's disk, which a server in trouble would only be slower for."""

    def __init__(self, to: ToEvent[Any], subject: Work[Any], js: JetStream) -> None:
        self.name = f"{subject.durable}-{to.name.rpartition('.')[2].replace('*', 'all')}"
        self.stream = subject.stream
        self._config = ConsumerConfig(
            durable_name=self.name,
            filter_subject=to.name,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=subject.ack_wait_s,
            max_ack_pending=MOST_PENDING,
        )
        self._queue = to.name
        self._js = js
        self._asking = asyncio.Lock()
        self._life = 0
        """How often it was made, as far as this process knows."""
        self._there = False
        self._down = False

    async def there(self) -> int:
        """Returns once it is there: which life of it that is."""
        async with self._asking:
            wait_s = RETRY_S
            while not self._there:
                try:
                    await self._js.ensure_consumer(self.stream, self._config)
                except PdbusError as error:
                    self.failed(error)
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, _LONGEST_RETRY_S)
                else:
                    self._there = True
                    self._life += 1
        return self._life

    def gone(self, life: int) -> None:
        """That life of it has ended: another one begins, unless it has by now."""
        if life == self._life:
            self._there = False

    def failed(self, error: PdbusError) -> None:
        if not self._down:
            log.warning("the work queue %s can't be read: %s", self._queue, error.message)
        self._down = True

    def answered(self) -> None:
        if self._down:
            log.warning("the work queue %s can be read again", self._queue)
        self._down = False


async def take(
    to: ToEvent[Q], subject: Work[Q], consumer: Consumer, js: JetStream, instruments: Instruments
) -> AsyncGenerator[Job[Q], None]:
    """Jobs of `to` as they become due; never ends by itself. An unsettled job is released on asking for the next."""
    async with js.puller(subject.stream, consumer.name) as puller:
        while True:
            life = await consumer.there()
            try:
                raw = await puller.pull(PULL_S)
            except (Unavailable, NotFound) as error:
                consumer.failed(error)
                if isinstance(error, NotFound):  # silence is no sign of that
                    consumer.gone(life)
                await asyncio.sleep(RETRY_S)
                continue
            consumer.answered()
            if raw is None:
                continue
            try:
                message = decode(subject.message, raw.data)
            except InvalidRequest as error:
                instruments.malformed(to.name, error.message)
                with suppress(Unavailable):
                    await js.settle(raw.reply, b"+TERM")
                continue
            job = Job(message, raw.reply, js, subject.ack_wait_s)
            try:
                yield job
            finally:
                with suppress(Unavailable):
                    await job.release()
