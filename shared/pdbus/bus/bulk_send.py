"""The sending side of a bulk stream: cuts items into frames, keeps to the window, sends again what was lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence

from pdbus.buffer import Buffer
from pdbus.bus import bulk_frames as frames
from pdbus.bus.bulk_frames import Frame
from pdbus.bus.codec import encode
from pdbus.bus.transport import Transport
from pdbus.context import Deadline
from pdbus.errors import DeadlineExceeded, PdbusError, TooLarge, Unavailable, WireError
from pdbus.messages.bulk import Credit

log = logging.getLogger(__name__)


class Outgoing:
    """One stream to one receiver. Made by `BulkPort.send`."""

    def __init__(self, transport: Transport, subject: str, reply: str, number: int, deadline: Deadline) -> None:
        self.subject = subject
        self._transport = transport
        self._reply = reply
        self._number = number
        self._deadline = deadline
        self._next = 0
        self._unacknowledged: deque[Frame] = deque()
        self._window = frames.FIRST_WINDOW_FRAMES
        self._news = asyncio.Event()
        self._error: PdbusError | None = None
        self._met = False
        """The receiver has given credit."""
        self._nobody_since: float | None = None

    async def item(self, head: object, *body: Buffer) -> None:
        """Sends one item; waits while the receiver is a window behind. `body`: in one part, or several that are one for
        the receiver; it must not change until the stream ends.

        Raises what the receiver gave up with, Unavailable when it falls silent, DeadlineExceeded, TooLarge."""
        parts = [memoryview(part).cast("B") for part in body]
        item_bytes = sum(map(len, parts))
        for flags, part_head, cut in self._cut(encode(head), parts, item_bytes):
            await self._send(flags, part_head, cut, item_bytes)

    async def end(self) -> None:
        """Sends the end and waits until the receiver has taken everything."""
        await self._send(frames.END, b"", (b"",), 0)
        await self._wait(everything=True)

    def abort(self, error: BaseException) -> None:
        """Tells the receiver why nothing more comes; once, without waiting."""
        body = encode(WireError.of(error))
        with contextlib.suppress(Unavailable):
            self._emit(Frame(frames.ABORT, self._next, self._number, 0, b"", body))

    def on_credit(self, credit: Credit) -> None:
        """What the receiver has taken, and up to where more may follow."""
        if credit.error:
            self.fail(credit.error.to_exception())
            return
        if credit.received > self._next:
            log.warning("credit for frames to %s that were never sent", self.subject)
            return
        while self._unacknowledged and self._unacknowledged[0].sequence < credit.received:
            self._unacknowledged.popleft()
        self._met = True
        self._nobody_since = None
        self._window = max(1, min(credit.window, frames.WINDOW_FRAMES))
        self._news.set()
        if credit.resend:
            self._resend()

    def on_nobody(self) -> None:
        """The broker knows no subscriber: a receiver never met isn't there, one that was may be reconnecting."""
        now = time.monotonic()
        self._nobody_since = self._nobody_since or now
        if not self._met or now - self._nobody_since > frames.NOBODY_S:
            self.fail(Unavailable(f"nobody receives bulk frames at {self.subject}"))
        self._news.set()

    def fail(self, error: PdbusError) -> None:
        self._error = self._error or error
        self._news.set()

    def _cut(
        self, head: bytes, body: Sequence[memoryview], item_bytes: int
    ) -> Iterator[tuple[int, bytes, Sequence[memoryview]]]:
        size = min(frames.FRAME_BYTES, self._transport.max_payload - 4096 - len(head))
        if len(head) >= 1 << 16 or item_bytes > frames.LARGEST_ITEM_BYTES or size <= 0:
            limit = frames.LARGEST_ITEM_BYTES
            raise TooLarge(f"a bulk item of {len(head)} + {item_bytes} bytes; {limit} are the limit")
        starts = range(0, max(item_bytes, 1), size)
        for start in starts:
            first = frames.ITEM_FIRST if start == 0 else 0
            last = frames.ITEM_LAST if start == starts[-1] else 0
            yield first | last, head if first else b"", _between(body, start, start + size)

    async def _send(self, flags: int, head: bytes, body: Sequence[Buffer], item_bytes: int) -> None:
        await self._wait(everything=False)
        frame = Frame(flags, self._next, self._number, item_bytes, head, body[0], tuple(body[1:]))
        self._next += 1
        self._unacknowledged.append(frame)
        with contextlib.suppress(Unavailable):  # lost like any other frame: the receiver's silence repairs it
            self._emit(frame)
            await self._transport.writable()
        if frame.body_bytes >= frames.TURN_BYTES:
            await asyncio.sleep(0)

    async def _wait(self, *, everything: bool) -> None:
        """Waits until the window has room for a frame, or until `everything` is acknowledged."""
        silences = 0
        while self._error is None and len(self._unacknowledged) > (0 if everything else self._window - 1):
            self._news.clear()
            try:
                async with self._deadline.within(frames.SILENCE_S).timeout():
                    await self._news.wait()
                silences = 0
                if self._nobody_since:
                    await asyncio.sleep(frames.NOBODY_PROBE_S)
                    self._probe()
            except TimeoutError:
                if self._deadline.passed:
                    raise DeadlineExceeded(f"bulk frames to {self.subject} were not taken in time") from None
                if self._news.is_set():  # in the same turn of the loop
                    continue
                silences += 1
                if silences >= frames.SILENCES:
                    raise Unavailable(f"the receiver at {self.subject} went silent") from None
                self._probe()
        if self._error:
            raise self._error

    def _probe(self) -> None:
        """A frame that the receiver knows makes it tell where it is; one that it lacks makes it ask for the rest."""
        with contextlib.suppress(Unavailable):
            if self._unacknowledged:
                self._emit(self._unacknowledged[0])

    def _resend(self) -> None:
        alive = Frame(frames.ALIVE, self._next, self._number, 0, b"", b"")
        with contextlib.suppress(Unavailable):
            for frame in self._unacknowledged or (alive,):
                self._emit(frame)

    def _emit(self, frame: Frame) -> None:
        self._transport.send(self.subject, *frame.parts(), reply=self._reply)


def _between(parts: Sequence[memoryview], start: int, end: int) -> Sequence[memoryview]:
    """What lies there of these, one after another; at least one, which may be empty."""
    found, at = [], 0
    for part in parts:
        if piece := part[max(start - at, 0) : max(end - at, 0)]:
            found.append(piece)
        at += len(part)
    return found or [memoryview(b"")]
