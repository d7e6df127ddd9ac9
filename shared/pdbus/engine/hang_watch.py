"""Looks after an engine's thread, from the event loop (engine/progress.py has the rule)."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from pdbus.engine.progress import LOOK_S, Progress, Standstill
from pdbus.errors import Unavailable
from pdbus.messages.presence import Card
from pdbus.tasks import OwnTask

log = logging.getLogger(__name__)


class HangWatch(OwnTask):
    """Looks while entered. `on_change` is called when the thread hangs, and when it goes on after all; `give_up` once,
    with the reason, when nothing is hoped for any more."""

    def __init__(
        self, progress: Progress, on_change: Callable[[], object], give_up: Callable[[Unavailable], object]
    ) -> None:
        self.hung = False
        self._progress, self._on_change, self._give_up = progress, on_change, give_up
        self._standstill = Standstill()

    @property
    def _said(self) -> str:
        return f"the engine has finished no step for {self._standstill.stood_s:.1f} s"

    def told(self, card: Card) -> Card:
        """Says so on the card, where the thread hangs."""
        return replace(card, state="hung", detail="the engine finishes no step") if self.hung else card

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            verdict = self._standstill.look(self._progress, time.monotonic())
            if self.hung != (verdict != "well"):
                self.hung = verdict != "well"
                log.warning("%s: its answers go on elsewhere", self._said) if self.hung else log.info("it goes on")
                self._on_change()
            if verdict == "given up":
                break
        log.critical("%s: this process ends, to be started anew; where its threads are:", self._said)
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        self._give_up(Unavailable(self._said))
