"""The calling side of a StreamRpc: frames in sequence, from a bounded queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from pdbus.bus import headers
from pdbus.bus.codec import decode
from pdbus.bus.transport import Raw
from pdbus.context import Deadline
from pdbus.errors import Corrupt, DeadlineExceeded, InvalidRequest, Overloaded, PdbusError, Unavailable

R = TypeVar("R")

LONGEST_SILENCE_S = 3.0
"""Three signs of life missed: the sender is dead or cut off."""
_LATE_S = 0.25
"""Of this process's own event loop: a little lateness is every busy machine's."""
QUEUE_FRAMES = 1024
"""A reader further behind than this loses the stream (not the process its memory)."""


class Replies(Generic[R]):
    """An asynchronous iterator over the replies. Raises the peer's error as its class; Corrupt on a gap."""

    def __init__(self, name: str, reply_type: type[R], deadline: Deadline) -> None:
        self.stop_subject = ""
        """Where the sender hears that nobody reads any more."""
        self.finished = False
        """The last frame was seen, so the sender needs to hear nothing."""
        self.name = name
        self._reply_type = reply_type
        self._deadline = deadline
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
                return self._decode(raw)
        raise StopAsyncIteration

    async def _next(self) -> Raw:
        while True:
            within = self._deadline.within(LONGEST_SILENCE_S)
            try:
                async with within.timeout():
                    item = await self._queue.get()
            except TimeoutError:
                if self._deadline.passed:
                    raise DeadlineExceeded(f"{self.name} did not end in time") from None
                if not self._queue.empty() or -within.remaining_s > _LATE_S:
                    continue  # it was this process that was held up: what came meanwhile is still to be read
                raise Unavailable(f"{self.name} went silent") from None
            if isinstance(item, PdbusError):
                raise item
            return item

    def _decode(self, raw: Raw) -> R:
        try:
            return decode(self._reply_type, raw.data)
        except InvalidRequest as error:
            raise Corrupt(f"{self.name} sent a reply that can't be read: {error.message}") from None
