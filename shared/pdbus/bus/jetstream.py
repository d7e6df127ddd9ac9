"""The few JetStream operations that logs and work queues need, through nats-py, with its errors translated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import nats.errors
import nats.js
import nats.js.errors
from nats.js.api import ConsumerConfig, StreamConfig

from pdbus.bus.nats import NatsTransport
from pdbus.bus.nats_client import GuardedClient
from pdbus.errors import Conflict, NotFound, PdbusError, Unavailable

REQUEST_S = 3.0
"""For one answer of JetStream; a leader election takes longer, and the caller tries again."""

_NO_MESSAGE = 10037
_STREAM_EXISTS = 10058
_WRONG_LAST_SEQUENCE = (10071, 10164)


@dataclass(frozen=True, slots=True)
class Stored:
    seq: int
    time_ns: int
    data: bytes
    message_id: str


@dataclass(frozen=True, slots=True)
class StreamState:
    created: str
    last_seq: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """A message of a work queue. What is published to `reply` settles it."""

    data: bytes
    reply: str
    subject: str


class JetStream:
    """Raises NotFound (stream or consumer), Conflict (failed compare), Unavailable for all that may pass."""

    def __init__(self, transport: NatsTransport) -> None:
        self._transport = transport

    async def ensure_stream(self, config: StreamConfig) -> None:
        """Creates the stream, or brings an existing one to `config`."""
        async with self._context() as js:
            try:
                await js.add_stream(config)
            except nats.js.errors.APIError as error:
                if error.err_code != _STREAM_EXISTS:
                    raise
                await js.update_stream(config)

    async def ensure_consumer(self, stream: str, config: ConsumerConfig) -> None:
        async with self._context() as js:
            await js.add_consumer(stream, config)

    async def state(self, stream: str) -> StreamState:
        async with self._context() as js:
            info = await js.stream_info(stream)
        return StreamState(str(info.created), int(info.state.last_seq))

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str]) -> int:
        """Returns the sequence; of the first copy, if the message id is known already."""
        async with self._context() as js:
            ack = await js.publish(subject, data, headers=dict(headers))
        return int(ack.seq)

    async def next(self, stream: str, subject: str, from_seq: int) -> Stored | None:
        """The first message of `subject` from that sequence on, or None."""
        return await self._get(stream, seq=from_seq, subject=subject, next=True)

    async def last(self, stream: str, subject: str) -> Stored | None:
        return await self._get(stream, subject=subject)

    async def pull(self, stream: str, consumer: str, wait_s: float) -> Pulled | None:
        """The next message of a work queue, or None when none came within `wait_s`. One at a time, so that no pull
        request outlives its answer."""
        request = b'{"batch":1,"expires":%d}' % int(wait_s * 1e9)
        async with self._translated() as client:
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
            message = await client.request(subject, request, timeout=wait_s + REQUEST_S)
        status = (message.headers or {}).get("Status")
        if status in (None, ""):
            return Pulled(message.data, message.reply, message.subject)
        if status == "409":
            raise NotFound(f"consumer {consumer} of {stream} is gone")
        return None

    async def settle(self, reply: str, verdict: bytes) -> None:
        """Tells the verdict on a pulled message, and waits until it is known to be taken."""
        async with self._translated() as client:
            await client.request(reply, verdict, timeout=REQUEST_S)

    def keep(self, reply: str) -> None:
        """Says that a pulled message is still being worked on."""
        self._transport.send(reply, b"+WPI")

    async def _get(self, stream: str, **what: object) -> Stored | None:
        async with self._context() as js:
            try:
                message = await js.get_msg(stream, **what)
            except nats.js.errors.NotFoundError as error:
                if error.err_code == _NO_MESSAGE:
                    return None
                raise
        message_id = str((message.headers or {}).get("Nats-Msg-Id", ""))
        return Stored(int(message.seq), int(message.time.timestamp() * 1e9), message.data or b"", message_id)

    @asynccontextmanager
    async def _context(self) -> AsyncIterator[nats.js.JetStreamContext]:
        async with self._translated() as client:
            yield client.jetstream(timeout=REQUEST_S)

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[GuardedClient]:
        try:
            yield self._transport.client
        except nats.js.errors.NotFoundError as error:
            raise NotFound(str(error.description)) from None
        except nats.js.errors.APIError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                raise Conflict(str(error.description)) from None
            if error.code is not None and int(error.code) >= 500:
                raise Unavailable(f"JetStream: {error.description}") from None
            raise PdbusError(f"JetStream refused: {error.description}") from error
        except (TimeoutError, nats.errors.Error) as error:
            raise Unavailable(f"JetStream did not answer ({type(error).__name__})") from None
