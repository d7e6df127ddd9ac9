"""The few JetStream operations that logs and work queues need, through nats-py, with its errors translated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import nats.errors
import nats.js
import nats.js.errors
from nats.js.api import ConsumerConfig, StreamConfig

from pdbus.bus.nats import NatsTransport
from pdbus.bus.nats_client import GuardedClient
from pdbus.bus.nats_wire import read_headers
from pdbus.bus.transport import NO_RESPONDERS, STATUS, Raw
from pdbus.context import new_id
from pdbus.errors import Conflict, NotFound, Overloaded, PdbusError, Unavailable

REQUEST_S = 3.0
"""For one answer of JetStream; a leader election takes longer, and the caller tries again."""

_NO_MESSAGE = 10037
_STREAM_EXISTS = 10058
_WRONG_LAST_SEQUENCE = (10071, 10164)
_NOT_STORED = 10077
"""A stream that refuses what is new, and has no room: the description tells it from other failures of a store."""


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
    first_seq: int
    """Of the oldest message that is still there; one beyond the last where there is none."""


class _Wanted(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    seq: int | None = None
    next_by_subj: str | None = None
    last_by_subj: str | None = None


class _Found(msgspec.Struct, frozen=True):
    """`data` and `hdrs` are base64 there."""

    seq: int
    time: datetime
    data: bytes = b""
    hdrs: bytes = b""


class _Answer(msgspec.Struct, frozen=True):
    message: _Found | None = None
    error: dict[str, Any] | None = None


class JetStream:
    """Raises NotFound (stream or consumer), Conflict (failed compare), Overloaded (a full stream that refuses what
    is new), Unavailable for all that may pass."""

    def __init__(self, transport: NatsTransport) -> None:
        self._transport = transport

    async def ensure_stream(self, config: StreamConfig) -> None:
        """Creates the stream, or brings an existing one to `config`. Raises Forbidden where it is not there, or not so,
        and this process may not make it."""
        async with self._context() as js:
            try:
                there = (await js.stream_info(str(config.name))).config
            except nats.js.errors.NotFoundError:
                try:
                    await js.add_stream(config)
                    return
                except nats.js.errors.APIError as error:
                    if error.err_code != _STREAM_EXISTS:
                        raise
                    there = (await js.stream_info(str(config.name))).config  # another process was quicker
            if all(getattr(there, name) == wanted for name, wanted in vars(config).items() if wanted is not None):
                return
            await js.update_stream(config)

    async def ensure_consumer(self, stream: str, config: ConsumerConfig) -> str:
        """Returns its name, which the server gives to one without."""
        async with self._context() as js:
            return str((await js.add_consumer(stream, config)).name)

    async def delete_consumer(self, stream: str, consumer: str) -> None:
        async with self._context() as js:
            await js.delete_consumer(stream, consumer)

    async def state(self, stream: str) -> StreamState:
        async with self._context() as js:
            info = await js.stream_info(stream)
        return StreamState(str(info.created), int(info.state.last_seq), int(info.state.first_seq))

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str]) -> int:
        """Returns the sequence; of the first copy, if the message id is known already."""
        async with self._context() as js:
            ack = await js.publish(subject, data, headers=dict(headers))
        return int(ack.seq)

    async def next(self, stream: str, subject: str, from_seq: int) -> Stored | None:
        """The first message of `subject` from that sequence on, or None."""
        return await self._get(stream, _Wanted(seq=from_seq, next_by_subj=subject))

    async def last(self, stream: str, subject: str) -> Stored | None:
        return await self._get(stream, _Wanted(last_by_subj=subject))

    async def purge(self, stream: str, subject: str, below_seq: int | None) -> None:
        """Removes the messages of `subject` whose sequence is below that; all of them, where it is None."""
        async with self._context() as js:
            await js.purge_stream(stream, seq=below_seq, subject=subject)

    async def counts(self, stream: str, pattern: str) -> dict[str, int]:
        """By subject that matches, the number of its messages."""
        async with self._context() as js:
            info = await js.stream_info(stream, subjects_filter=pattern)
        return {subject: int(count) for subject, count in (info.state.subjects or {}).items()}

    async def settle(self, reply: str, verdict: bytes) -> None:
        """Tells the verdict on a pulled message, and waits until it is known to be taken."""
        async with self._translated() as client:
            await client.request(reply, verdict, timeout=REQUEST_S)

    def keep(self, reply: str) -> None:
        """Says that a pulled message is still being worked on. Raises Unavailable."""
        self._transport.send(reply, b"+WPI")

    @asynccontextmanager
    async def puller(self, stream: str, consumer: str) -> AsyncIterator[Puller]:
        puller = Puller(self._transport, f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}")
        subscription = await self._transport.subscribe(puller.inbox, puller.on_message)
        try:
            yield puller
        finally:
            await subscription.close()

    async def _get(self, stream: str, wanted: _Wanted) -> Stored | None:
        """Read here: nats-py takes headers apart as if they were a mail's, at half of the whole call's cost."""
        async with self._translated() as client:
            try:
                raw = await client.request(
                    f"$JS.API.STREAM.MSG.GET.{stream}", msgspec.json.encode(wanted), timeout=REQUEST_S
                )
            except nats.errors.NoRespondersError:
                raise nats.js.errors.ServiceUnavailableError(code=503, description="nobody answers") from None
            answer = msgspec.json.decode(raw.data, type=_Answer)
            if answer.error is not None:
                if answer.error.get("err_code") == _NO_MESSAGE:
                    return None
                nats.js.errors.APIError.from_error(answer.error)
            found = answer.message
            if found is None:
                raise Unavailable("JetStream answered with nothing")
        message_id = read_headers(found.hdrs).get("nats-msg-id", "")
        return Stored(found.seq, int(found.time.timestamp() * 1e9), found.data, message_id)

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
            if error.err_code == _NOT_STORED and "maximum" in str(error.description):
                raise Overloaded(f"JetStream has no room: {error.description}") from None
            if error.code is not None and int(error.code) >= 500:
                raise Unavailable(f"JetStream: {error.description}") from None
            raise PdbusError(f"JetStream refused: {error.description}") from error
        except (TimeoutError, nats.errors.Error, msgspec.MsgspecError) as error:
            raise Unavailable(f"JetStream did not answer ({type(error).__name__})") from None


class Puller:
    """Takes from a work queue, one message at a time, so that no pull request outlives its answer by much.

    The server delivers a pulled message under its own subject, so nats-py's request() can't see it as the answer."""

    def __init__(self, transport: NatsTransport, subject: str) -> None:
        self.inbox = f"{transport.inbox_prefix}.{new_id()}"
        self._transport = transport
        self._subject = subject
        self._came: asyncio.Queue[Raw] = asyncio.Queue()

    def on_message(self, raw: Raw) -> None:
        self._came.put_nowait(raw)

    async def pull(self, wait_s: float) -> Raw | None:
        """The next message, or None when none came. What is sent to its `reply` settles it.

        Raises NotFound (the consumer is gone), Unavailable."""
        if self._came.empty():  # else one came after the last wait was over
            self._transport.send(self._subject, b'{"batch":1,"expires":%d}' % int(wait_s * 1e9), reply=self.inbox)
        try:
            async with asyncio.timeout(wait_s + REQUEST_S):
                raw = await self._came.get()
        except TimeoutError:
            raise Unavailable("JetStream did not answer a pull request") from None
        status = raw.headers.get(STATUS)
        if status == NO_RESPONDERS:
            raise NotFound("the consumer is gone")
        if status is None:
            return raw
        return None  # 404 or 408: nothing there; 409: the consumer changed, which the next pull tells
