"""Logs and work queues: the durable, ordered part of the bus, on JetStream. Real servers only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, TypeVar

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from pdbus.bus.codec import encode
from pdbus.bus.follower import Follower
from pdbus.bus.instruments import Instruments
from pdbus.bus.jetstream import JetStream, StreamState
from pdbus.bus.nats import NatsTransport
from pdbus.bus.work import Job, take
from pdbus.context import Deadline, new_id
from pdbus.errors import Conflict, Unavailable
from pdbus.subjects import ANY, CHANGELOG, DELETES, INVALIDATED, Log, ToEvent, Work

Q = TypeVar("Q")

APPEND_S = 10.0
RETRY_S = 0.1


class Logs:
    """Appending to and following logs; putting into and taking from work queues."""

    def __init__(self, transport: NatsTransport, instruments: Instruments) -> None:
        self._transport = transport
        self._instruments = instruments
        self._js = JetStream(transport)
        self._followers: list[Follower[Any]] = []

    async def close(self) -> None:
        for follower in self._followers:
            await follower.aclose()

    async def ensure(self) -> None:
        """Creates the streams, or brings existing ones to what is written here. Every service may call it.

        Raises Unavailable when JetStream does not answer for 10 s; one lost answer ends no service's start."""
        deadline = Deadline.after(APPEND_S)
        for config in stream_configs():
            while True:
                try:
                    await self._js.ensure_stream(config)
                    break
                except Unavailable:
                    if deadline.remaining_s < RETRY_S:
                        raise
                await asyncio.sleep(RETRY_S)

    async def append(
        self,
        to: ToEvent[Q],
        entry: Q,
        *,
        expected_seq: int | None = None,
        message_id: str | None = None,
        deadline: Deadline | None = None,
    ) -> int:
        """Appends `entry` durably and returns its sequence. Retried under one message id while JetStream is away.

        `expected_seq`: only if the subject's last entry has this sequence (0: it has none); else Conflict.
        `message_id`: an entry appended twice under one id within ten minutes counts once, and so does one with the
        same `expected_seq` at any time; both return the first one's sequence.
        Raises Conflict, Unavailable when the deadline (10 s) passes without an answer, TooLarge."""
        deadline = deadline or Deadline.after(APPEND_S)
        message_id = message_id or new_id()
        headers = {"Nats-Msg-Id": message_id, "Nats-Expected-Stream": _stream(to)}
        if expected_seq is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expected_seq)
        data = encode(entry)
        while True:
            try:
                return await self._append_once(to, data, headers, expected_seq)
            except Unavailable:
                if deadline.remaining_s < RETRY_S:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _append_once(
        self, to: ToEvent[Q], data: bytes, headers: Mapping[str, str], expected_seq: int | None
    ) -> int:
        try:
            return await self._js.publish(to.name, data, headers)
        except Conflict:
            # The server compares before it looks for duplicates. If this very entry is the one that came next after
            # the expected sequence, an earlier try had succeeded and only its answer was lost.
            winner = await self._js.next(_stream(to), to.name, (expected_seq or 0) + 1)
            if winner and winner.message_id == headers["Nats-Msg-Id"]:
                return winner.seq
            raise

    async def state(self, to: ToEvent[Q]) -> StreamState:
        """Of the stream behind the log. Raises NotFound, Unavailable."""
        return await self._js.state(_stream(to))

    async def last_seq(self, to: ToEvent[Q]) -> int:
        """Sequence of the subject's last entry, 0 if it has none. Raises Unavailable, NotFound (no stream)."""
        last = await self._js.last(_stream(to), to.name)
        return last.seq if last else 0

    def follow(self, to: ToEvent[Q], after: int = 0) -> Follower[Q]:
        """The records of `to` after that sequence, and then each new one."""
        if not isinstance(to.subject, Log):
            raise TypeError(f"{to.name} is not a log")
        follower = Follower(to, to.subject, after, self._transport, self._js, self._instruments)
        self._followers = [other for other in self._followers if not other.closed]
        self._followers.append(follower)
        return follower

    async def enqueue(self, to: ToEvent[Q], message: Q, *, message_id: str | None = None) -> int:
        """Puts `message` into a work queue durably; as `append`."""
        return await self.append(to, message, message_id=message_id)

    def work(self, to: ToEvent[Q]) -> AsyncGenerator[Job[Q], None]:
        """Jobs of a work queue, one at a time; each goes to one worker of the queue."""
        if not isinstance(to.subject, Work):
            raise TypeError(f"{to.name} is not a work queue")
        return take(to, to.subject, self._js, self._instruments)


def stream_configs() -> list[StreamConfig]:
    """How each stream is kept."""
    return [
        StreamConfig(
            name=CHANGELOG.stream,
            subjects=[CHANGELOG.name(model=ANY)],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            deny_delete=True,
            deny_purge=True,
            duplicate_window=600,
        ),
        StreamConfig(
            name=INVALIDATED.stream,
            subjects=[INVALIDATED.name()],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            max_age=24 * 3600,  # a cache that was away for longer starts empty
            duplicate_window=600,
        ),
        StreamConfig(
            name=DELETES.stream,
            subjects=[DELETES.name(model=ANY)],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            max_bytes=64 << 20,
            discard=DiscardPolicy.NEW,  # a reminder that has no room is an error, never a silent loss
            duplicate_window=600,
        ),
    ]


def _stream(to: ToEvent[Q]) -> str:
    if not isinstance(to.subject, Log | Work):
        raise TypeError(f"{to.name} is an event: it is not stored")
    return to.subject.stream
