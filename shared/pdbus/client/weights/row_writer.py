"""Row updates on their way into the log: gathered into messages, several of them in flight, in the order of the calls.

A message leaves when it is full, after a few milliseconds, or at once where none has left for that long. One whose
append fails is repeated under its id, without the rows that later messages carry: so the last value that this writer
gave to a row is the one that stays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np

from pdbus.bus.bus import Bus
from pdbus.context import Deadline, new_id
from pdbus.errors import DeadlineExceeded, PdbusError, Unavailable
from pdbus.messages.rows import RowsUpdate
from pdbus.subjects import ToEvent
from pdbus.weights.blocks import Array
from pdbus.weights.tables import encoded_ids, encoded_values, last_of_each

_GATHER_S = 0.004
_IN_FLIGHT = 16
_SPREAD = 256
"""Messages between the oldest in flight and the newest, at most: their ids are remembered."""
_APPEND_S = 30.0
_RETRY_S = 0.1


@dataclass(slots=True, eq=False)
class _Batch:
    number: int
    ids: Array
    values: Array
    done: asyncio.Future[int]
    id: str = field(default_factory=new_id)
    deadline: Deadline = field(default_factory=lambda: Deadline.after(_APPEND_S))


class Accepted:
    """Rows that are on their way. Awaited, it is their sequence in the log, once they are durable there; raises what
    that failed with, and then they are lost."""

    __slots__ = ("_done",)

    def __init__(self, done: asyncio.Future[int]) -> None:
        self._done = done

    def __await__(self) -> Generator[None, None, int]:
        return asyncio.shield(self._done).__await__()  # others may wait for the same message


class RowWriter:
    """Of one log. Holds one message that is being gathered, and those in flight; `add` waits while both are full."""

    def __init__(self, bus: Bus, to: ToEvent[RowsUpdate], width: int, most_rows: int) -> None:
        self.seq = 0
        """Of the newest entry that is known to be in the log."""
        self.messages = 0
        self._bus, self._to, self._most = bus, to, most_rows
        self._ids = np.empty(most_rows, np.int64)
        self._values = np.empty((most_rows, width), np.float32)
        self._used = 0
        self._since_s = self._sent_s = 0.0
        self._done: asyncio.Future[int] | None = None
        """Of the message that is being gathered."""
        self._timer: asyncio.TimerHandle | None = None
        self._flying: dict[int, asyncio.Task[None]] = {}
        self._recent: dict[int, Array] = {}
        """By number, the ids of messages since the oldest in flight."""
        self._failing: set[int] = set()
        """While one has to be repeated, no new one leaves."""
        self._landed = asyncio.Event()
        self._error: PdbusError | None = None
        self._closed = False

    async def add(self, ids: Array, values: Array) -> Accepted:
        """Takes rows: ids [n] in range, values [n, width]. Of rows that take several messages the sequence is the last
        one's."""
        start = 0
        while True:
            if self._used and time.monotonic() - self._since_s > 2 * _GATHER_S:
                await asyncio.sleep(0)  # a caller that never pauses must not hold up what is due
            while self._used == self._most:
                await self._landing()
            if not self._used:
                self._since_s = time.monotonic()
            count = min(self._most - self._used, len(ids) - start)
            self._ids[self._used : self._used + count] = ids[start : start + count]
            self._values[self._used : self._used + count] = values[start : start + count]
            self._used += count
            start += count
            done = self._done = self._done or asyncio.get_running_loop().create_future()
            self._schedule()
            if start == len(ids):
                return Accepted(done)

    def add_one(self, row: int, values: Array) -> Accepted | None:
        """As `add`, for one row [width]; None where that has to wait first."""
        at = self._used
        if at == self._most or (at and time.monotonic() - self._since_s > 2 * _GATHER_S):
            return None
        if not at:
            self._since_s = time.monotonic()
        self._ids[at], self._values[at] = row, values
        self._used = at + 1
        done = self._done = self._done or asyncio.get_running_loop().create_future()
        if self._timer is None or at + 1 == self._most:
            self._schedule()
        return Accepted(done)

    async def flush(self, deadline: Deadline) -> int:
        """Waits until all that was added is durable; returns the newest sequence.

        Raises DeadlineExceeded, and what an append has failed with since the last flush: those rows are lost."""
        try:
            async with deadline.timeout():
                while self._used or self._flying:
                    self._send()
                    await self._landing()
        except TimeoutError:
            raise DeadlineExceeded(f"{self._used} rows and {len(self._flying)} messages are not durable yet") from None
        error, self._error = self._error, None
        if error:
            raise error
        return self.seq

    async def close(self, deadline: Deadline) -> None:
        """As `flush`; what is not durable then is given up."""
        try:
            await self.flush(deadline)
        finally:
            self._closed = True
            if self._timer:
                self._timer.cancel()
            if self._done:
                self._done.cancel()
            for task in self._flying.values():
                task.cancel()
            await asyncio.gather(*self._flying.values(), return_exceptions=True)

    async def _landing(self) -> None:
        self._landed.clear()
        await self._landed.wait()

    def _schedule(self) -> None:
        if self._used == self._most:
            self._send()
        elif self._timer is None:
            idle = not self._flying and time.monotonic() - self._sent_s > _GATHER_S
            wait_s = 0.0 if idle else _GATHER_S  # 0: what is added in the same turn of the loop joins
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._due)

    def _due(self) -> None:
        self._timer = None
        self._send()

    def _send(self) -> None:
        """Lets what was gathered leave, unless it has to wait for others: then the next that lands does."""
        oldest = min(self._flying, default=self.messages)
        if (
            self._closed
            or not self._used
            or self._failing
            or len(self._flying) >= _IN_FLIGHT
            or self.messages - oldest >= _SPREAD
        ):
            return
        if self._timer:
            self._timer.cancel()
            self._timer = None
        done, self._done = self._done, None
        assert done
        ids, values = last_of_each(self._ids[: self._used], self._values[: self._used])
        batch = _Batch(self.messages, ids.copy(), values.copy(), done)
        self._used, self._sent_s = 0, time.monotonic()
        self.messages += 1
        self._recent[batch.number] = batch.ids
        self._flying[batch.number] = asyncio.create_task(self._append(batch))

    async def _append(self, batch: _Batch) -> None:
        try:
            seq = await self._durable(batch)
        except asyncio.CancelledError:
            batch.done.cancel()
            raise
        except Exception as error:
            self._error = error if isinstance(error, PdbusError) else PdbusError(f"an update failed: {error!r}")
            if not batch.done.done():
                batch.done.set_exception(self._error)
                batch.done.exception()  # `flush` raises it, too: not everybody looks here
        else:
            self.seq = max(self.seq, seq)
            if not batch.done.done():
                batch.done.set_result(seq)
        finally:
            self._failing.discard(batch.number)
            del self._flying[batch.number]
            oldest = min(self._flying, default=self.messages)
            for number in [number for number in self._recent if number < oldest]:
                del self._recent[number]
            self._landed.set()
            if self._timer is None or self._used == self._most:  # else what was gathered isn't due yet
                self._send()

    async def _durable(self, batch: _Batch) -> int:
        while True:
            update = RowsUpdate(encoded_ids(batch.ids), encoded_values(batch.values))
            try:
                # Tried once: before the next try it has to be known what left since.
                return await self._bus.logs.append(self._to, update, message_id=batch.id, deadline=Deadline.after(0.0))
            except Unavailable as error:
                if batch.deadline.passed:
                    raise Unavailable(f"{error.message}; rows of this update are lost") from None
                self._failing.add(batch.number)
            await asyncio.sleep(_RETRY_S)
            later = [ids for number, ids in self._recent.items() if number > batch.number]
            if later:
                keep = ~np.isin(batch.ids, np.concatenate(later))
                batch.ids, batch.values = batch.ids[keep], batch.values[keep]
