"""The receiving side of a bulk stream: frames in order, credit as they are used, requests for what was lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from pdbus.buffer import Buffer
from pdbus.bus import bulk_frames as frames
from pdbus.bus.bulk_frames import Frame
from pdbus.bus.codec import decode
from pdbus.context import Deadline
from pdbus.errors import Conflict, Corrupt, DeadlineExceeded, InvalidRequest, PdbusError, Unavailable, WireError
from pdbus.messages.bulk import Credit

H = TypeVar("H")


class Incoming:
    """One stream from one sender. Made by `BulkPort.receive` and `receive_at`.

    Frames `[0, taken)` were given to the reader, `[taken, expected)` lie in the queue. Credit counts taken ones, so
    that no more than the window waits here however slow the reader is."""

    def __init__(self, stream: str, subject: str, send_credit: Callable[[str, Credit], None]) -> None:
        self.stream = stream
        """The id to name in a request; with this port's address it is where the sender sends to."""
        self.subject = subject
        self.window = frames.WINDOW_FRAMES
        """What this stream's share of the memory allows; the port sets it."""
        self.finished = False
        self._send_credit = send_credit
        self._sender: tuple[str, str] | None = None
        self._begins_by: Deadline | None = None
        self._queue: deque[Frame] = deque()
        self._expected = 0
        self._taken = 0
        self._credited = 0
        self._gap = False
        self._asked_from = -1
        self._heard = False
        self._news = asyncio.Event()
        self._error: PdbusError | None = None

    @property
    def taken(self) -> int:
        return self._taken

    def begins_by(self, deadline: Deadline) -> None:
        """A sender of which nothing has come by then is given up: what told it of this stream may have been lost."""
        self._begins_by = deadline

    async def items(self, head_type: type[H], deadline: Deadline) -> AsyncGenerator[tuple[H, Buffer], None]:
        """Each item's checked head and its body (a view or a bytearray) until the sender's end.

        Raises what the sender gave up with, Unavailable when it falls silent, DeadlineExceeded, Corrupt."""
        while not self.finished:
            frame = await self._take(deadline)
            if frame.flags & frames.END:
                self.finished = True
                self._credit()
                return
            if not frame.flags & frames.ITEM_FIRST:
                raise Corrupt(f"bulk stream {self.subject}: an item begins in its middle")
            try:
                head = decode(head_type, frame.head)
            except InvalidRequest as error:
                raise Corrupt(f"bulk stream {self.subject}: {error.message}") from None
            body = frame.body if frame.flags & frames.ITEM_LAST else await self._join(frame, deadline)
            if len(body) != frame.item_bytes:
                raise Corrupt(f"bulk stream {self.subject}: {len(body)} bytes of an item of {frame.item_bytes}")
            yield head, body

    def on_frame(self, frame: Frame, reply: str) -> None:
        """`reply`: the sender's credit subject."""
        sender = (reply, str(frame.stream))
        if self._sender is None:
            self._sender = sender
        elif self._sender != sender:
            taken = WireError.of(Conflict("another sender has this stream"))
            self._send_credit(reply, Credit(sender[1], 0, error=taken))
            return
        self._heard = True
        if frame.flags & frames.ABORT:
            self._error = _reason(frame)
        elif frame.sequence < self._expected:
            self._credit()
        elif frame.sequence > self._expected or len(self._queue) >= frames.WINDOW_FRAMES:
            self._gap = True
        elif not frame.flags & frames.ALIVE:
            self._expected += 1
            self._gap = False
            self._queue.append(frame)
        self._news.set()

    def on_garbage(self) -> None:
        """Something unreadable came: perhaps one of ours was damaged."""
        self._gap = True
        self._news.set()

    def refuse(self, error: BaseException) -> None:
        """Tells the sender, if there is one yet, that nothing more is wanted."""
        if self._sender and not self.finished and self._error is None:
            reply, stream = self._sender
            self._send_credit(reply, Credit(stream, self._taken, error=WireError.of(error)))

    async def _take(self, deadline: Deadline) -> Frame:
        silences = 0
        while not self._queue:
            if self._error:
                raise self._error
            if self._gap and self._asked_from != self._expected:
                self._ask()
            self._news.clear()
            begins_by = self._begins_by if self._sender is None else None
            wait_s = min(frames.SILENCE_S, max(begins_by.remaining_s, 0.0)) if begins_by else frames.SILENCE_S
            try:
                async with deadline.within(wait_s).timeout():
                    await self._news.wait()
            except TimeoutError:
                if deadline.passed:
                    raise DeadlineExceeded(f"bulk stream {self.subject} did not end in time") from None
                if self._news.is_set():  # in the same turn of the loop
                    continue
                if begins_by and begins_by.passed:
                    raise Unavailable(f"nobody began to send to {self.subject}") from None
                silences = 0 if self._heard else silences + 1
                if self._sender and silences >= frames.SILENCES:
                    raise Unavailable(f"the sender of {self.subject} went silent") from None
                self._ask()
        frame = self._queue.popleft()
        self._taken += 1
        if self._taken - self._credited >= max(1, self.window // 2) or self._credited == 0:
            self._credit()
        if len(frame.body) >= frames.TURN_BYTES:
            await asyncio.sleep(0)
        return frame

    async def _join(self, first: Frame, deadline: Deadline) -> bytearray:
        if first.item_bytes > frames.LARGEST_ITEM_BYTES:
            raise Corrupt(f"bulk stream {self.subject}: an item of {first.item_bytes} bytes")
        body = bytearray(first.item_bytes)
        frame, filled = first, 0
        while True:
            end = filled + len(frame.body)
            if end > len(body):
                raise Corrupt(f"bulk stream {self.subject}: an item is longer than it said")
            body[filled:end] = frame.body
            filled = end
            if frame.flags & frames.ITEM_LAST:
                del body[filled:]
                return body
            frame = await self._take(deadline)
            if frame.flags & (frames.ITEM_FIRST | frames.END):
                raise Corrupt(f"bulk stream {self.subject}: an item ends in its middle")

    def _ask(self) -> None:
        self._asked_from = self._expected
        self._heard = False
        self._credit(resend=True)

    def _credit(self, *, resend: bool = False) -> None:
        if self._sender:
            self._credited = self._taken
            reply, stream = self._sender
            self._send_credit(reply, Credit(stream, self._taken, self.window, resend))


def _reason(frame: Frame) -> PdbusError:
    try:
        return decode(WireError, frame.body).to_exception()
    except InvalidRequest:
        return Unavailable("the sender gave up")
