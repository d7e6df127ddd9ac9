"""What the event loop hears of the engine's thread: lists of events, in order, and that a sequence was let go of.

One list comes for a turn, and one for each layer whose KV became final in a prompt that is handed over. A list is a few
small records, never KV itself; should the loop fall behind by `_UNHEARD` of them, the engine waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from pdbus.engine.sequence import Ended, Event, Sequence
from pdbus.engine.work import ThreadWork
from pdbus.errors import Unavailable

_UNHEARD = 256
_LOOK_S = 0.2
"""While it waits for the loop, the engine looks whether it has to stop this often."""


class Hearing:
    """`tell` is the thread's, all else the event loop's. `on_events` and `on_failure`: as Core's."""

    def __init__(
        self, work: ThreadWork, on_events: Callable[[list[Event]], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        """`work`: the thread's, which says when that has to stop."""
        self._work, self._on_events, self._on_failure = work, on_events, on_failure
        self._unheard = threading.Semaphore(_UNHEARD)
        self._live: dict[Sequence, asyncio.Future[None]] = {}
        self._gone = False
        """The thread has ended: no sequence is computed any more."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Before the thread starts: all is heard in this loop."""
        self._loop = loop

    @property
    def live(self) -> int:
        """Sequences whose end was not heard yet."""
        return len(self._live)

    def expect(self, sequence: Sequence) -> None:
        """The sequence is handed to the thread now. Raises Unavailable where that has ended."""
        if self._gone:
            raise Unavailable("the engine has stopped")
        self._live[sequence] = self._loop.create_future()

    async def ended(self, sequence: Sequence) -> None:
        """Returns when its end was heard; at once where it was heard before."""
        if sequence in self._live:
            await asyncio.shield(self._live[sequence])

    def tell(self, events: list[Event]) -> None:
        """By the thread."""
        if not events:
            return
        while not self._unheard.acquire(timeout=_LOOK_S):
            if self._work.stopping:
                return
        self._loop.call_soon_threadsafe(self._hear, events)

    def end(self, failure: BaseException | None) -> None:
        """The thread has ended, with an error or as it was asked to."""
        self._gone = True
        for ended in self._live.values():
            if not ended.done():
                ended.set_result(None)
        self._live.clear()
        if failure is not None:
            self._on_failure(failure)

    def _hear(self, events: list[Event]) -> None:
        self._unheard.release()
        try:
            self._on_events(events)
        finally:
            for event in events:
                if isinstance(event, Ended) and (ended := self._live.pop(event.sequence, None)) and not ended.done():
                    ended.set_result(None)
