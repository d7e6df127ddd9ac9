"""Where the pages of preempted sequences wait: one file of page-sized slots, with a thread of its own.

The file has no name from the moment it is made, so that nothing stays of it however the process ends. It is written by
`pwrite`, where a full disk is an error and not a signal, and read through a map. What could not be written stays in
memory, and nothing more is taken from then on.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)


class Swapped:
    """Pages in the file, or on their way there or back. Made by `SwapFile.save`."""

    def __init__(self, slots: list[int], body: memoryview) -> None:
        self.slots = slots
        self.body: memoryview | None = body
        """Page after page; None while it is in the file only."""
        self.wanted = False
        """It is needed again: what is in memory stays there."""


class SwapFile:
    """At most `budget_bytes`; 0: takes nothing. `folder`: of the file; None: where temporary files lie.

    Its owner's thread calls `save`, `fetch` and `free`. Leaving waits for what is under way."""

    def __init__(self, folder: Path | None, budget_bytes: int, page_bytes: int) -> None:
        self._folder, self._page_bytes = folder, page_bytes
        self.slots = budget_bytes // page_bytes
        self._free = list(range(self.slots - 1, -1, -1))
        self._lock = threading.Lock()
        self._broken = False

    @property
    def free_slots(self) -> int:
        return 0 if self._broken else len(self._free)

    @property
    def used_slots(self) -> int:
        return self.slots - len(self._free)

    def __enter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, "swap")
        self._stack = contextlib.ExitStack()
        if not self.slots:
            return self
        try:
            if self._folder:
                self._folder.mkdir(parents=True, exist_ok=True)
            file = self._stack.enter_context(tempfile.TemporaryFile(dir=self._folder, prefix="swap-", buffering=0))
            self._fd = file.fileno()
            os.ftruncate(self._fd, self.slots * self._page_bytes)
            self._map = self._stack.enter_context(mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ))
        except OSError as error:
            self._break(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        self._stack.close()

    def save(self, body: memoryview) -> Swapped | None:
        """Takes whole pages, which must not change any more. None where there is no room for all of them."""
        count = body.nbytes // self._page_bytes
        if count > self.free_slots:
            return None
        swapped = Swapped([self._free.pop() for _ in range(count)], body)
        self._thread.submit(self._write, swapped)
        return swapped

    def fetch(self, swapped: Swapped, done: Callable[[], None]) -> bool:
        """True where the pages are in `swapped.body` and stay there; else they are being brought, and `done` is called
        in another thread once they are."""
        with self._lock:
            if swapped.body is not None:
                swapped.wanted = True
                return True
            if not swapped.wanted:
                swapped.wanted = True
                self._thread.submit(self._read, swapped, done)
        return False

    def free(self, swapped: Swapped) -> None:
        """They are not needed any more. Safe to repeat."""
        slots, swapped.slots = swapped.slots, []
        # Whoever gets these slots next is written after what is still under way: there is one thread.
        self._free += slots
        swapped.body = None

    def _write(self, swapped: Swapped) -> None:
        body, slots = swapped.body, list(swapped.slots)
        if body is None or swapped.wanted or not slots:
            return
        size = self._page_bytes
        try:
            for at, slot in enumerate(slots):
                if os.pwrite(self._fd, body[at * size : (at + 1) * size], slot * size) != size:
                    raise OSError("a page was written in part only")
        except OSError as error:
            self._break(error)
            return
        with self._lock:
            if not swapped.wanted:
                swapped.body = None

    def _read(self, swapped: Swapped, done: Callable[[], None]) -> None:
        size = self._page_bytes
        body = b"".join(self._map[slot * size : (slot + 1) * size] for slot in list(swapped.slots))
        swapped.body = memoryview(body)
        done()

    def _break(self, error: OSError) -> None:
        self._broken = True
        log.warning("nothing more is swapped out: %s", error)
