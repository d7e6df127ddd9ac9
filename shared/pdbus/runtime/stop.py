"""A request to stop, and who hears it when."""

from __future__ import annotations

import asyncio
import logging
import signal

log = logging.getLogger(__name__)


class Stop:
    """Interrupts the start of the task that made it, ends its serving, and when repeated cuts its draining short.

    The owner sets `starting` to False once it is up, and waits for `requested` from then on."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.hurry = asyncio.Event()
        """It was asked for twice: don't wait for running work."""
        self.starting = True
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()

    def on_signals(self, *signals: signal.Signals) -> None:
        for number in signals:
            self._loop.add_signal_handler(number, self.request, number.name)

    def request(self, reason: str) -> None:
        log.info("stopping: %s", reason)
        if self.requested.is_set():
            self.hurry.set()
        elif self.starting and self._task is not None:
            self._task.cancel()
        self.requested.set()

    def launcher_lost(self) -> None:
        """From the lifeline's thread. Nothing is drained: the launcher's NATS server goes as well."""

        def lost() -> None:
            self.hurry.set()
            self.request("the launcher is gone")

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lost)
