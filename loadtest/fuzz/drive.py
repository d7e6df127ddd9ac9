"""One kind's inputs, one after another or some at once; each bounded in time, each failure told with its number."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Protocol

from loadtest.fuzz.board import Board

LIMIT_S = 30.0
"""For one input, on a machine that may be busy with much else; the table tells the slowest that there was."""
_LINES = 12


class Fuzzer(Protocol):
    width: int
    """Inputs that may be under way at once."""

    async def one(self, rng: Random) -> bool:
        """Puts one input in. True: it was accepted, False: refused. Whatever it raises is a crash."""

    async def ends(self) -> None:
        """Raises where good requests are no longer answered, or something is still held."""


Tell = Callable[[str], None]


def once_each(tell: Tell) -> Tell:
    """Of failures that end alike only the first is told: a thousand inputs may find the same one."""
    seen: Counter[str] = Counter()

    def told(text: str) -> None:
        ends = "\n".join(text.splitlines()[-2:])
        seen[ends] += 1
        if seen[ends] == 1:
            tell(text)

    return told


async def drive(fuzzer: Fuzzer, seed: int, first: int, count: int, board: Board, tell: Tell) -> None:
    """Inputs `first` to `first + count`; each is the same whenever it is drawn from the same seed."""
    numbers = iter(range(first, first + count))
    with _watched(board, tell):
        await asyncio.gather(*(_some(fuzzer, seed, numbers, board, tell) for _ in range(fuzzer.width)))
        await fuzzer.ends()


async def _some(fuzzer: Fuzzer, seed: int, numbers: Iterator[int], board: Board, tell: Tell) -> None:
    for number in numbers:
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(LIMIT_S):
                accepted = await fuzzer.one(Random(f"{seed}/{number}"))
            board["accepted" if accepted else "refused"] += 1
        except TimeoutError:
            board["hangs"] += 1
            tell(f"input {number}: no end within {LIMIT_S:g} s")
        except Exception:
            board["crashes"] += 1
            tell(f"input {number}: {_told(traceback.format_exc())}")
        took_us = int((time.perf_counter() - begun) * 1e6)
        if took_us > board["slowest_us"]:
            board["slowest_us"], board["slowest_at"] = took_us, number
        board["inputs"] += 1
        await asyncio.sleep(0)  # an input that waits for nothing would keep the loop from letting its timers go


@contextmanager
def _watched(board: Board, tell: Tell) -> Iterator[None]:
    """What is only logged counts too: an exception that nobody was told of but the log is a crash."""
    watch, root = _Watch(board, tell), logging.getLogger()
    root.addHandler(watch)
    try:
        yield
    finally:
        root.removeHandler(watch)


class _Watch(logging.Handler):
    def __init__(self, board: Board, tell: Tell) -> None:
        super().__init__(logging.ERROR)
        self._board, self._tell = board, tell

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._board["crashes"] += 1
            shown = "".join(traceback.format_exception(*record.exc_info))
            self._tell(f"logged: {record.getMessage()}: {_told(shown)}")


def _told(shown: str) -> str:
    return "\n".join(shown.rstrip().splitlines()[-_LINES:])
