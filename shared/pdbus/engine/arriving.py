"""Cached KV of a sequence that is still on its way, layer by layer, while the rest of it is computed already.

The event loop writes it into the pages and says how far it is; the engine's thread waits before it reads a layer.
"""

from __future__ import annotations

import threading
import time


class Late(Exception):
    """Raised in the engine's thread: a layer did not come in time, or will not come."""


class Arriving:
    """`within_s`: how long the engine may wait in all, from now on. Where that is not enough it leaves the pass, and
    computes the sequence once all is there or given up."""

    def __init__(self, within_s: float) -> None:
        self._until_s = time.monotonic() + within_s
        self._layers = 0
        self._failed = False
        self._news = threading.Condition()

    def arrived(self, layers: int) -> None:
        """By the event loop: the first `layers` layers are in the pages."""
        with self._news:
            self._layers = layers
            self._news.notify()

    def fail(self) -> None:
        """By the event loop: nothing more comes. Safe to repeat, and after all has come."""
        with self._news:
            self._failed = True
            self._news.notify()

    def wait(self, layer: int) -> None:
        """By the engine's thread: returns once the layer is there. Raises Late."""
        if self._layers > layer:
            return
        with self._news:
            self._news.wait_for(lambda: self._layers > layer or self._failed, self._until_s - time.monotonic())
            if self._layers <= layer:
                self._failed = True
                raise Late
