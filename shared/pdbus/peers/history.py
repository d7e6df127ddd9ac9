"""The change log of a model, followed: a History that is kept up to date while the process lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from pdbus.bus.bus import Bus
from pdbus.bus.follower import Follower
from pdbus.context import Deadline
from pdbus.errors import Corrupt, DeadlineExceeded, InvalidRequest, NotFound, PdbusError, Unavailable
from pdbus.messages.changelog import LogEntry
from pdbus.recording import Recorder
from pdbus.subjects import CHANGELOG, CHECKPOINTS
from pdbus.tasks import OwnTask
from pdbus.weights.history import History

log = logging.getLogger(__name__)
T = TypeVar("T")

_RETRY_S = 0.5
_POLL_S = 0.1


class HistoryFollower(OwnTask):
    """Follows the change log of `model`, from its last checkpoint on. Entering starts it; `caught_up` awaits its first
    end.

    Where the log itself was lost and begins anew, so does `history`: what only the old log knew is gone."""

    def __init__(self, bus: Bus, model: str) -> None:
        self.history = History()
        self.born = ""
        """When the log that `history` is of was made; empty while there is none."""
        self._bus = bus
        self._to, self._checkpoints = CHANGELOG(model=model), CHECKPOINTS(model=model)
        self._follower: Follower[LogEntry] | None = None
        self._callbacks: list[Callable[[History], object]] = []
        self._changed = asyncio.Event()

    @property
    def seq(self) -> int:
        """Of the last entry that was read; what an append may compare with. Beyond `history.seq` where an entry could
        not be understood."""
        return max(self.history.seq, self._follower.seq if self._follower else 0)

    @property
    def confirmed_age_s(self) -> float:
        """Seconds since it was last certain that the log holds nothing beyond `history`; infinite before that."""
        return time.monotonic() - self._follower.confirmed_at if self._follower else math.inf

    def on_change(self, callback: Callable[[History], object]) -> Callable[[], None]:
        """Calls `callback(history)` after each entry; it must be quick, its errors are logged. Returns what ends it."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    async def wait_for(self, predicate: Callable[[History], T], deadline: Deadline) -> T:
        """The first true result of `predicate(history)`, now or after a later entry. Raises DeadlineExceeded."""
        try:
            async with deadline.timeout():
                while not (found := predicate(self.history)):
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded("the change log did not get there in time") from None
        return found

    async def caught_up(self, deadline: Deadline) -> None:
        """Returns once all is known that the log held at the time of the call. Asks again where no answer comes.

        Raises DeadlineExceeded."""
        try:
            async with deadline.timeout():
                last = await self._last_seq()
                while self.seq < last:
                    # Nothing is told of an entry that can't be understood, hence the poll.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_POLL_S):
                            await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded("the change log could not be followed to its end in time") from None

    async def _last_seq(self) -> int:
        while True:
            try:
                return await self._bus.logs.last_seq(self._to)
            except Unavailable as error:
                log.debug("the change log's end is asked for again: %s", error.message)
            await asyncio.sleep(_POLL_S)

    async def _run(self) -> None:
        while True:
            try:
                await self._apply_all()
            except Corrupt as error:
                self.born = ""
                if self.history.seq:  # else there is only no log yet
                    log.error("the change log begins anew: %s", error.message)
                    self.history = History()
                    self._tell()
            except PdbusError as error:
                log.warning("the change log can't be read, trying again: %s", error.message)
            except Exception:
                log.exception("following the change log failed, trying again")
            self._follower = None
            await asyncio.sleep(_RETRY_S)

    async def _begin(self) -> None:
        """From the last checkpoint, where it is one of this very log; else from the beginning."""
        try:
            self.born = (await self._bus.logs.state(self._to)).created
            last = await self._bus.logs.last(self._checkpoints)
        except (NotFound, InvalidRequest):  # no stream yet, or a checkpoint that this version can't read
            return
        if last and last.entry.log == self.born:
            self.history = History.restored(last.entry)
            self._tell()

    async def _apply_all(self) -> None:
        if not self.history.seq:
            await self._begin()
        async with contextlib.aclosing(self._bus.logs.follow(self._to, self.history.seq, self.born)) as follower:
            self._follower = follower
            async for record in follower:
                self.history.apply(record.seq, record.time_ns, record.entry)
                if self._bus.recorder:
                    record_entry(self._bus.recorder, record.seq, record.time_ns, record.entry)
                self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for callback in tuple(self._callbacks):
            try:
                callback(self.history)
            except Exception:
                log.exception("a follower of the change log failed")


def record_entry(recorder: Recorder, seq: int, time_ns: int, entry: LogEntry) -> None:
    """What this process has learned of the change log. `at`: when the log took it."""
    put = partial(recorder.put, "log", seq=seq, at=time_ns)
    if entry.commit:
        put(kind="commit", tx=entry.commit.tx, root=entry.commit.root, ref=entry.commit.ref)
    elif entry.abort:
        put(kind="abort", tx=entry.abort.tx)
    elif entry.ref:
        put(kind="ref", ref=entry.ref.name, root=entry.ref.root, now=entry.ref.now)
    else:
        put(kind="other")
