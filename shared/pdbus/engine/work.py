"""Work that is given to the engine's thread, to be done between two of its turns."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class ThreadWork:
    """All that is given is done, once and in order: by the thread, and after its end by whoever gives it, since then
    nobody else changes anything."""

    def __init__(self) -> None:
        self.stopping = False
        self._over = False
        self._work: deque[Callable[[], object]] = deque()
        self._news = threading.Condition()

    def post(self, work: Callable[[], object]) -> None:
        """`work` must not raise."""
        with self._news:
            if not self._over:
                self._work.append(work)
                self._news.notify()
                return
        work()

    async def call(self, work: Callable[[], T]) -> T:
        """Returns or raises what `work` does. It is done also where nobody waits for it any more."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        self.post(run)
        return await asyncio.shield(asyncio.wrap_future(done))

    def wake(self) -> None:
        with self._news:
            self._news.notify()

    def stop(self) -> None:
        """Asks the thread to end."""
        with self._news:
            self.stopping = True
            self._news.notify()

    def do(self, idle_s: float) -> bool:
        """By the thread: does what is given, after waiting up to `idle_s` for some. False: it is time to stop."""
        with self._news:
            if not (self._work or self.stopping) and idle_s:
                self._news.wait(idle_s)
        if self.stopping:
            return False
        while self._work:
            self._work.popleft()()
        return True

    def abandon(self) -> None:
        """The thread will do nothing any more, since it hangs; should it wake up after all, it ends."""
        self.stop()
        self.end()

    def end(self) -> None:
        """By the thread, as its last act."""
        with self._news:
            while self._work:
                self._work.popleft()()
            self._over = True
