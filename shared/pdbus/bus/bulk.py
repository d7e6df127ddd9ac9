"""Bulk transfer: streams of items under credit, on a connection of their own so that they never delay a token.

The receiver opens a stream and names it in a request; the sender sends items to it:

    async with bus.bulk.receive() as incoming:                      async with bus.bulk.send(subject, deadline) as out:
        await bus.call(..., receiver=bus.bulk.address,                  await out.item(BlockHead(0), block)
                            stream=incoming.stream, ...)
        async for head, body in incoming.items(BlockHead, deadline): ...

Frames that are lost, doubled, out of order or damaged are sent again (go-back-N); see bulk_frames.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pdbus.bus import bulk_frames as frames
from pdbus.bus.bulk_frames import Frame, read_frame
from pdbus.bus.bulk_receive import Incoming
from pdbus.bus.bulk_send import Outgoing
from pdbus.bus.codec import decode, encode
from pdbus.bus.instruments import Instruments
from pdbus.bus.transport import NO_RESPONDERS, STATUS, Callback, Raw, Subscription, Transport
from pdbus.context import LONGEST_DEADLINE_S, Deadline, new_id
from pdbus.errors import (
    Cancelled,
    Conflict,
    Corrupt,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    PdbusError,
    Unavailable,
    WireError,
)
from pdbus.messages.bulk import Credit
from pdbus.subjects import ANY, CREDIT, TRANSFER

log = logging.getLogger(__name__)

RECEIVE_BUDGET_FRAMES = 60
"""Frames that may be under way to this process, over all its streams: 38 MiB. The server cuts off a connection that is
64 MiB behind, and by then has lost data."""
MOST_INCOMING = RECEIVE_BUDGET_FRAMES // frames.FIRST_WINDOW_FRAMES
REMEMBERED_ENDS = 512
"""Streams that ended: their senders may ask again, because the last credit was lost."""


class BulkPort:
    """One process's end of all its bulk streams."""

    def __init__(self, transport: Transport, instruments: Instruments) -> None:
        self.address = new_id()
        """Random for this life of the process."""
        self._transport = transport
        self._instruments = instruments
        self._reply = CREDIT.name(address=self.address)
        self._numbers = itertools.count(1)
        self._incoming: dict[str, Incoming] = {}
        self._outgoing: dict[str, Outgoing] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._slots = asyncio.Semaphore(MOST_INCOMING)
        self._subscriptions: list[Subscription] = []
        self._receives, self._sends = asyncio.Lock(), asyncio.Lock()
        self._listening: set[str] = set()

    @property
    def open_streams(self) -> int:
        """Both directions."""
        return len(self._incoming) + len(self._outgoing)

    async def stop(self) -> None:
        """Fails what is still open and ends the subscriptions."""
        for outgoing in self._outgoing.values():
            outgoing.fail(Unavailable("this process is stopping"))
        for subscription in reversed(self._subscriptions):
            await subscription.close()

    async def listen(self, pattern: str) -> None:
        """Takes frames to `pattern` until the bus ends. Those of a subject without a `receive_at` are refused."""
        self._subscriptions.append(await self._transport.subscribe(pattern, self._on_frame))

    @asynccontextmanager
    async def receive(self, deadline: Deadline | None = None) -> AsyncIterator[Incoming]:
        """A new stream to this port's address. Waits while MOST_INCOMING are open. Leaving early stops the sender.

        Raises DeadlineExceeded."""
        await self._listen_once(self._receives, TRANSFER.name(address=self.address, stream=ANY), self._on_frame)
        stream = new_id()
        subject = TRANSFER.name(address=self.address, stream=stream)
        async with self._receive(stream, subject, deadline) as incoming:
            yield incoming

    @asynccontextmanager
    async def receive_at(self, subject: str) -> AsyncIterator[Incoming]:
        """A stream at a subject that is listened to. Raises Conflict when it is open already."""
        async with self._receive(subject.rpartition(".")[2], subject, None) as incoming:
            yield incoming

    @asynccontextmanager
    async def _receive(self, stream: str, subject: str, deadline: Deadline | None) -> AsyncIterator[Incoming]:
        try:
            async with (deadline or Deadline.after(LONGEST_DEADLINE_S)).timeout():
                await self._slots.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"none of {MOST_INCOMING} bulk streams became free in time") from None
        try:
            if subject in self._incoming:
                raise Conflict(f"the bulk stream {subject} is open already")
            incoming = self._incoming[subject] = Incoming(stream, subject, self._send_credit)
            self._ended.pop(subject, None)
            self._share()
            try:
                yield incoming
            except BaseException as error:
                incoming.refuse(error if isinstance(error, Exception) else Cancelled("the receiver stopped"))
                raise
            else:
                incoming.refuse(Cancelled("the receiver wants nothing more"))
            finally:
                del self._incoming[subject]
                self._share()
                if incoming.finished:
                    self._remember(subject, incoming.taken)
        finally:
            self._slots.release()

    @asynccontextmanager
    async def send(self, subject: str, deadline: Deadline) -> AsyncIterator[Outgoing]:
        """A stream to `subject`: `await out.item(head, body)` for each item.

        Leaving cleanly waits until the receiver has taken everything; leaving by an exception tells the receiver, who
        raises it as its class. Raises as `Outgoing.item`."""
        await self._listen_once(self._sends, self._reply, self._on_credit)
        number = next(self._numbers)
        outgoing = self._outgoing[str(number)] = Outgoing(self._transport, subject, self._reply, number, deadline)
        try:
            yield outgoing
            await outgoing.end()
        except BaseException as error:
            outgoing.abort(error if isinstance(error, Exception) else Cancelled("the sender stopped"))
            raise
        finally:
            del self._outgoing[str(number)]

    async def _listen_once(self, turn: asyncio.Lock, subject: str, callback: Callback) -> None:
        """Not before it is needed: processes that only ask are not permitted any of it."""
        if subject not in self._listening:
            async with turn:
                if subject not in self._listening:
                    self._subscriptions.append(await self._transport.subscribe(subject, callback))
                    self._listening.add(subject)

    def _share(self) -> None:
        """Divides the budget among the open incoming streams."""
        fair = RECEIVE_BUDGET_FRAMES // max(len(self._incoming), 1)
        for incoming in self._incoming.values():
            incoming.window = max(frames.FIRST_WINDOW_FRAMES, min(frames.WINDOW_FRAMES, fair))

    def _remember(self, subject: str, taken: int) -> None:
        self._ended[subject] = taken
        if len(self._ended) > REMEMBERED_ENDS:
            self._ended.popitem(last=False)

    def _on_frame(self, raw: Raw) -> None:
        incoming = self._incoming.get(raw.subject)
        try:
            frame = read_frame(raw.data)
            if CREDIT.tokens(raw.reply) is None:
                raise Corrupt("a bulk frame does not say where its credit goes")
        except Corrupt as error:
            self._instruments.malformed(raw.subject, error.message)
            if incoming:
                incoming.on_garbage()
            return
        if incoming:
            incoming.on_frame(frame, raw.reply)
        elif not frame.flags & frames.ABORT:
            self._answer_stranger(raw, frame)

    def _answer_stranger(self, raw: Raw, frame: Frame) -> None:
        taken = self._ended.get(raw.subject)
        if taken is not None:
            self._send_credit(raw.reply, Credit(str(frame.stream), taken))
        else:
            unknown = WireError.of(NotFound("there is no such bulk stream here"))
            self._send_credit(raw.reply, Credit(str(frame.stream), 0, error=unknown))

    def _on_credit(self, raw: Raw) -> None:
        if raw.headers.get(STATUS) == NO_RESPONDERS:
            nobody_at = raw.headers.get("nats-subject")
            for outgoing in self._outgoing.values():
                if outgoing.subject == nobody_at:
                    outgoing.on_nobody()
            return
        try:
            credit = decode(Credit, raw.data)
        except InvalidRequest as error:
            self._instruments.malformed(raw.subject, error.message)
            return
        known = self._outgoing.get(credit.stream)
        if known:
            known.on_credit(credit)

    def _send_credit(self, reply: str, credit: Credit) -> None:
        with suppress(PdbusError):  # lost like any message: the sender's probe brings us here again
            self._transport.send(reply, encode(credit))
