"""Token frames from workers, handed to the attempts that they belong to.

A frame that is missing is noticed by the worker's frame number at once, or by an item's index; silence by a look at
every attempt ten times a second; and dead workers by that, or as soon as the fleet's table says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from pdbus.backoff import RetryBudget
from pdbus.bus.bus import Bus
from pdbus.messages.router import TokenFrame, TokenItem
from pdbus.router.cancels import Cancels
from pdbus.router.metrics import RouterMetrics
from pdbus.router.workers import Workers
from pdbus.subjects import TOKENS
from pdbus.tasks import cancelled

if TYPE_CHECKING:
    from pdbus.router.attempt import Attempt

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1
_CHECK_EVERY = 10
"""Looks, after which workers are checked though nobody has told of a change."""
_RETRIES_PER_S = 20.0
_RETRIES_AT_ONCE = 512.0
"""A worker that dies leaves as many answers to be taken over as it had running and waiting: that is no storm."""


class TokenHub:
    """The one subscription to this router's tokens. Delivery is synchronous: no task and no queue per token."""

    def __init__(self, bus: Bus, router: str, workers: Workers, cancels: Cancels, metrics: RouterMetrics) -> None:
        self.workers = workers
        self.cancels = cancels
        self.metrics = metrics
        self.retries = RetryBudget(time.monotonic(), per_s=_RETRIES_PER_S, most=_RETRIES_AT_ONCE)
        """Of all attempts after an answer's first."""
        self._bus = bus
        self._router = router
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._frames: dict[str, tuple[str, int]] = {}  # worker -> (incarnation, number of its last frame)
        self._fleet_changed = asyncio.Event()
        workers.fleet.on_change(self._fleet_changed.set)

    async def __aenter__(self) -> Self:
        self._registration = await self._bus.subscribe(TOKENS(router=self._router), self.on_frame)
        self._watch = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancelled(self._watch)
        await self._registration.close()

    @property
    def listening_for(self) -> int:
        """Attempts under way."""
        return len(self._attempts)

    @contextlib.contextmanager
    def listening(self, attempt: Attempt) -> Iterator[None]:
        key = (attempt.ticket.request_id, attempt.ticket.choice)
        self._attempts[key] = attempt
        try:
            yield
        finally:
            del self._attempts[key]

    def on_frame(self, frame: TokenFrame) -> None:
        self._note_number(frame)
        for item in frame.items:
            self._on_item(item, frame.worker)

    def _on_item(self, item: TokenItem, worker: str) -> None:
        if item.finish == "cancelled":
            self.cancels.answered(item, worker)
        attempt = self._attempts.get((item.request_id, item.choice))
        if attempt is not None:
            attempt.deliver(item, worker)
        elif item.finish != "cancelled":
            self.metrics.dropped("no_request")
        if item.finish is None and (attempt is None or item.attempt < attempt.ticket.attempt):
            self.cancels.stray(item, worker)

    def _note_number(self, frame: TokenFrame) -> None:
        incarnation, last = self._frames.get(frame.worker, ("", -1))
        known = incarnation == frame.incarnation
        self._frames[frame.worker] = (frame.incarnation, max(frame.seq, last) if known else frame.seq)
        if known and frame.seq > last + 1:
            self.metrics.gap()
            for attempt in tuple(self._attempts.values()):
                attempt.frame_lost(frame.worker)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        for turn in itertools.count():
            await asyncio.sleep(_LOOK_EVERY_S)
            changed = self._fleet_changed.is_set() or turn % _CHECK_EVERY == 0
            self._fleet_changed.clear()
            for attempt in tuple(self._attempts.values()):
                try:
                    if changed:
                        attempt.look_at_workers()
                    attempt.look(loop.time())
                except Exception:
                    log.exception("looking after %s failed", attempt.ticket.session)
