"""The calling side of a StreamRpc: frames in sequence, from a bounded queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from pdbus.bus import headers
from pdbus.bus.codec import decode
from pdbus.bus.transport import Raw
from pdbus.context import Deadline
from pdbus.errors import Corrupt, DeadlineExceeded, InvalidRequest, Overloaded, PdbusError, Unavailable

R = TypeVar("R")

LONGEST_SILENCE_S = 3.0
"""Three signs of life missed: the sender hangs or is cut off."""
BEGIN_S = 2.0
"""For the first frame. Whoever takes a request says so at once: it was lost, or has gone to one who died, hangs or is
cut off."""
QUIET_S = 0.5
"""So long without a frame, and the sender is asked for a sign of life: if it is dead, the broker says at once that
nobody is there. One that is at work is asked ever more rarely."""
_LATE_S = 0.25
"""Of this process's own event loop: a little lateness is every busy machine's."""
QUEUE_FRAMES = 1024
"""A reader further behind than this loses the stream (not the process its memory)."""


class Replies(Generic[R]):
    """An asynchronous iterator over the replies. Raises the peer's error as its class; Corrupt on a gap.

    `ask`: asks the sender, at its stop subject, for a sign of life."""

    def __init__(self, name: str, reply_type: type[R], deadline: Deadline, ask: Callable[[str], None]) -> None:
        self.stop_subject = ""
        """Where the sender hears that nobody reads any more, and that a sign of life is wanted."""
        self.finished = False
        """The last frame was seen, so the sender needs to hear nothing."""
        self.name = name
        self._reply_type = reply_type
        self._deadline = deadline
        self._ask = ask
        self._quiet_s = QUIET_S
        self._queue: asyncio.Queue[Raw | PdbusError] = asyncio.Queue()
        self._expected = 0

    def on_frame(self, raw: Raw) -> None:
        self.stop_subject = raw.reply or self.stop_subject
        if self._queue.qsize() < QUEUE_FRAMES:
            self._queue.put_nowait(raw)
        elif self._queue.qsize() == QUEUE_FRAMES:
            self._queue.put_nowait(Overloaded(f"the reader of {self.name} is {QUEUE_FRAMES} frames behind"))

    def fail(self, error: PdbusError) -> None:
        self._queue.put_nowait(error)

    def __aiter__(self) -> AsyncIterator[R]:
        return self

    async def __anext__(self) -> R:
        while not self.finished:
            raw = await self._next()
            error = headers.error_of(raw, self.name)
            if error:
                self.finished = True
                raise error
            if raw.headers.get(headers.SEQUENCE) != str(self._expected):
                sequence = raw.headers.get(headers.SEQUENCE)
                raise Corrupt(f"{self.name} sent frame {sequence} where frame {self._expected} was due")
            if headers.END in raw.headers:
                self.finished = True
            elif headers.ALIVE not in raw.headers:
                self._expected += 1
                self._quiet_s = QUIET_S
                return self._decode(raw)
        raise StopAsyncIteration

    async def _next(self) -> Raw:
        silent = self._patience()
        while True:
            quiet = silent.within(self._quiet_s)
            try:
                async with quiet.timeout():
                    item = await self._queue.get()
                break
            except TimeoutError:
                if self._deadline.passed:
                    raise DeadlineExceeded(f"{self.name} did not end in time") from None
                if not self._queue.empty() or -quiet.remaining_s > _LATE_S:
                    silent = self._patience()  # this process was held up: what came meanwhile is still to be read
                    continue
                if silent.passed:
                    raise Unavailable(f"{self.name} went silent") from None
            self._quiet_s = min(2 * self._quiet_s, LONGEST_SILENCE_S)
            if self.stop_subject:
                self._ask(self.stop_subject)
        if isinstance(item, PdbusError):
            raise item
        return item

    def _patience(self) -> Deadline:
        """For the next frame."""
        return self._deadline.within(LONGEST_SILENCE_S if self.stop_subject else BEGIN_S)

    def _decode(self, raw: Raw) -> R:
        try:
            return decode(self._reply_type, raw.data)
        except InvalidRequest as error:
            raise Corrupt(f"{self.name} sent a reply that can't be read: {error.message}") from None
