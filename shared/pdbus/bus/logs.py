"""Logs and work queues: the durable, ordered part of the bus, on JetStream. Real servers only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from nats.js.api import StreamConfig

from pdbus.bus.codec import decode, encode
from pdbus.bus.follower import Follower, Record
from pdbus.bus.instruments import Instruments
from pdbus.bus.jetstream import JetStream, Stored, StreamState
from pdbus.bus.nats import NatsTransport
from pdbus.bus.size_tail import RESERVES, SizeTail, TakeSize
from pdbus.bus.stream_configs import stream_configs
from pdbus.bus.tail import Tail, Take
from pdbus.bus.work import Consumer, Job, take
from pdbus.canonical import content_digest
from pdbus.context import Deadline, new_id
from pdbus.errors import Conflict, Forbidden, InvalidRequest, NotFound, Unavailable
from pdbus.subjects import Log, ToEvent, Work

Q = TypeVar("Q")

APPEND_S = 10.0
ENSURE_S = 60.0
RETRY_S = 0.1
_AHEAD = 16
"""Entries that are asked for at once."""


class Logs:
    """Appending to and following logs; putting into and taking from work queues."""

    def __init__(self, transport: NatsTransport, instruments: Instruments) -> None:
        self._transport = transport
        self._instruments = instruments
        self._js = JetStream(transport)
        self._followers: list[Follower[Any]] = []
        self._consumers: dict[str, Consumer] = {}
        """By the queue's name."""

    async def close(self) -> None:
        for follower in self._followers:
            await follower.aclose()

    async def ensure(self) -> None:
        """Creates the streams, or brings existing ones to what is written here. Every service may call it: those that
        are not permitted to (grants.py) wait for one that is.

        Raises Forbidden when none came in `ENSURE_S`, at once where this process may not even see the streams, and
        Unavailable when JetStream does not answer for so long; one lost answer ends no service's start."""
        deadline = Deadline.after(ENSURE_S)
        for config in stream_configs():
            await self._ensured(config, deadline)

    async def _ensured(self, config: StreamConfig, deadline: Deadline) -> None:
        refused: Forbidden | None = None
        while True:
            try:
                if refused:  # then it has to appear by somebody else
                    await self._js.state(str(config.name))
                else:
                    await self._js.ensure_stream(config)
                return
            except Forbidden as error:
                if refused:  # it may not even see them: waiting helps nobody
                    raise
                refused = error
            except (NotFound, Unavailable) as error:
                if deadline.remaining_s < RETRY_S:
                    raise refused or error from None
            await asyncio.sleep(RETRY_S)

    async def append(
        self,
        to: ToEvent[Q],
        entry: Q,
        *,
        expected_seq: int | None = None,
        message_id: str | None = None,
        deadline: Deadline | None = None,
        replaces: bool = False,
        reserves: int = 0,
    ) -> int:
        """Appends `entry` durably and returns its sequence. Retried under one message id while JetStream is away.

        `expected_seq`: only if the subject's last entry has this sequence (0: it has none); else Conflict.
        `message_id`: an entry appended twice under one id within ten minutes counts once, and so does one with the
        same `expected_seq` at any time; both return the first one's sequence.
        `replaces`: all earlier entries of the subject are removed (only where the stream allows it).
        `reserves`: so many bytes are set aside for what belongs to it, until the subject's next entry (size_tail.py).
        Raises Conflict, Unavailable when the deadline (10 s) passes without an answer, TooLarge, and Overloaded where
        the log is bounded and full."""
        deadline = deadline or Deadline.after(APPEND_S)
        message_id = message_id or new_id()
        headers = {"Nats-Msg-Id": message_id, "Nats-Expected-Stream": _stream(to)}
        if expected_seq is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expected_seq)
        if replaces:
            headers["Nats-Rollup"] = "sub"
        if reserves:
            headers[RESERVES] = str(reserves)
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

    async def identity(self, to: ToEvent[Q]) -> str:
        """Names the log's life, in 16 hex digits: one that was lost and made anew is another, and counts from 1 again.
        Raises NotFound, Unavailable."""
        return content_digest((await self.state(to)).created.encode())[:8].hex()

    def tail(self, to: ToEvent[Q], after: int, take: Take[Q]) -> Tail[Q]:
        """The entries of `to` after that sequence as they are stored, each given to `take(seq, entry)`."""
        if not isinstance(to.subject, Log):
            raise TypeError(f"{to.name} is not a log")
        return Tail(to, to.subject, after, take, self._transport, self._js, self._instruments)

    def sizes(self, to: ToEvent[Any], after: int, take: TakeSize) -> SizeTail:
        """As `tail`, without what is in the entries; of all subjects that `to` stands for (its tokens may be ANY)."""
        if not isinstance(to.subject, Log):
            raise TypeError(f"{to.name} is not a log")
        return SizeTail(to, to.subject, after, take, self._transport, self._js, self._instruments)

    async def last(self, to: ToEvent[Q]) -> Record[Q] | None:
        """The subject's last entry. Raises as `last_seq`; InvalidRequest where it can't be read."""
        stored = await self._js.last(_stream(to), to.name)
        return self._record(to, stored) if stored else None

    async def next(self, to: ToEvent[Q], after: int) -> Record[Q] | None:
        """The first entry after that sequence which can be read. Raises as `last_seq`."""
        while stored := await self._js.next(_stream(to), to.name, after + 1):
            with suppress(InvalidRequest):
                return self._record(to, stored)
            after = stored.seq
        return None

    async def between(self, to: ToEvent[Q], after: int, upto: int) -> AsyncGenerator[Record[Q], None]:
        """The entries after one sequence, up to another, that can be read. Raises as `last_seq`.

        Asked for many at a time: from each sequence on the next one, so that none is passed over."""
        while after < upto:
            asked = range(after + 1, min(after + _AHEAD, upto) + 1)
            stored = await asyncio.gather(*(self._js.next(_stream(to), to.name, seq) for seq in asked))
            found = {one.seq: one for one in stored if one and one.seq <= upto}
            if not found:
                return
            for seq in sorted(found):
                with suppress(InvalidRequest):
                    yield self._record(to, found[seq])
            after = max(found)

    def _record(self, to: ToEvent[Q], stored: Stored) -> Record[Q]:
        if not isinstance(to.subject, Log):
            raise TypeError(f"{to.name} is not a log")
        return Record(stored.seq, stored.time_ns, decode(to.subject.message, stored.data))

    async def purge(self, to: ToEvent[Q], *, upto: int | None = None) -> None:
        """Removes the subject's entries up to that sequence, or all. Raises Unavailable."""
        await self._js.purge(_stream(to), to.name, None if upto is None else upto + 1)

    async def counts(self, to: ToEvent[Q]) -> dict[str, int]:
        """How many entries each subject has that `to` stands for (its tokens may be ANY). Raises Unavailable."""
        return await self._js.counts(_stream(to), to.name)

    def follow(self, to: ToEvent[Q], after: int = 0, born: str = "") -> Follower[Q]:
        """The records of `to` after that sequence, and then each new one. `born`: of the log made then, if given."""
        if not isinstance(to.subject, Log):
            raise TypeError(f"{to.name} is not a log")
        follower = Follower(to, to.subject, after, self._transport, self._js, self._instruments, born)
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
        consumer = self._consumers.get(to.name) or Consumer(to, to.subject, self._js)
        self._consumers[to.name] = consumer
        return take(to, to.subject, consumer, self._js, self._instruments)


def _stream(to: ToEvent[Q]) -> str:
    if not isinstance(to.subject, Log | Work):
        raise TypeError(f"{to.name} is an event: it is not stored")
    return to.subject.stream
