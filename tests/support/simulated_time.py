"""Seconds that pass only when everybody waits for them: what is measured in them is the same on any machine.

The loop's clock, and with it `time.monotonic` and `time.time_ns`, stands still while anything is to be done, and jumps
to the next timer when nothing is. What a thread pool is asked for is done at once. For what comes from outside the
process this clock does not wait.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")

_START_S = 1000.0


class _Selector(selectors.DefaultSelector):
    """Waits for nobody: moves the clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = _START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if found or timeout == 0:
            return found
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        self.now_s += timeout
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def simulated(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs it, in a test that is no coroutine itself."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        loop = runner.get_loop()
        wall_ns = time.time_ns()
        with (
            mock.patch.object(time, "monotonic", loop.time),
            mock.patch.object(time, "time_ns", side_effect=lambda: wall_ns + int(loop.time() * 1e9)),
        ):
            return runner.run(main())
