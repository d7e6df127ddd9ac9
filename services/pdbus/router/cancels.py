"""Cancel events, repeated until every holder has answered, is gone, or was asked for long enough.

An event may be lost; what a lost one leaves behind at a worker is freed by that worker's own leases and deadlines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from pdbus.bus.bus import Bus
from pdbus.messages.common import Ticket
from pdbus.messages.router import TokenItem
from pdbus.messages.workers import Cancel, CancelReason
from pdbus.subjects import CANCEL
from pdbus.tasks import cancelled

_FIRST_REPEAT_S = 0.1
_LONGEST_S = 5.0
_MOST_OPEN = 4096
"""Beyond it, cancels are sent once."""
_STRAY_S = 1.0
_MOST_STRAYS = 1024


@dataclass(slots=True)
class _Open:
    """The holders of one session that have not answered, each with the highest attempt asked for."""

    attempts: dict[str, int] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Cancels:
    """Owns the tasks that repeat; `close` awaits them."""

    def __init__(self, bus: Bus, router: str, gone: Callable[[str], bool]) -> None:
        self._bus = bus
        self._router = router
        self._gone = gone
        self._open: dict[tuple[str, int], _Open] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._once: list[Cancel] = []
        """To be sent at the loop's next turn, and never again."""
        self._strays: dict[tuple[str, int, str], float] = {}
        """Until when a worker is not told again that nobody wants its tokens of a session."""

    @property
    def open(self) -> int:
        """Sessions whose holders have not all answered yet."""
        return len(self._open)

    def send(self, ticket: Ticket, holders: tuple[str, ...], reason: CancelReason) -> None:
        """Returns at once, so that it can be called while the caller itself is being cancelled."""
        message = Cancel(ticket.request_id, ticket.attempt, self._router, holders, ticket.choice, reason)
        if reason == "finished" or len(self._tasks) >= _MOST_OPEN:
            self._once.append(message)
            if len(self._once) == 1:
                self._own(self._publish_once())
            return
        waiting = self._open.setdefault((ticket.request_id, ticket.choice), _Open())
        for holder in holders:
            waiting.attempts[holder] = max(ticket.attempt, waiting.attempts.get(holder, 0))
        self._own(self._repeat(message, waiting))

    def stray(self, item: TokenItem, worker: str) -> None:
        """A worker still writes for an attempt that is over: it has heard no cancel, being stopped or cut off then."""
        key = (item.request_id, item.choice, worker)
        known = self._open.get((item.request_id, item.choice))
        now_s = asyncio.get_running_loop().time()
        if now_s < self._strays.get(key, 0.0) or (known and worker in known.attempts):
            return
        if len(self._strays) >= _MOST_STRAYS:
            self._strays.clear()
        self._strays[key] = now_s + _STRAY_S
        message = Cancel(item.request_id, item.attempt, self._router, (worker,), item.choice, "superseded")
        self._own(self._bus.publish(CANCEL(), message))

    def answered(self, item: TokenItem, worker: str) -> None:
        """A holder has freed what it held of that attempt."""
        waiting = self._open.get((item.request_id, item.choice))
        if waiting and waiting.attempts.get(worker, item.attempt + 1) <= item.attempt:
            del waiting.attempts[worker]
            waiting.changed.set()

    async def close(self) -> None:
        """Waits for the repeats, which are bounded."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LONGEST_S)
        await cancelled(*self._tasks)
        self._open.clear()

    async def _repeat(self, message: Cancel, waiting: _Open) -> None:
        loop = asyncio.get_running_loop()
        wait_s, end = _FIRST_REPEAT_S, loop.time() + _LONGEST_S
        # At least once, also where all are gone: one that is only stopped hears it when it goes on.
        while loop.time() < end:
            await self._bus.publish(CANCEL(), message)
            again = loop.time() + wait_s
            while self._unanswered(message, waiting) and loop.time() < again:
                waiting.changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(again):
                        await waiting.changed.wait()
            if not self._unanswered(message, waiting):
                break
            wait_s *= 2
        for holder in message.holders:
            if waiting.attempts.get(holder, message.attempt + 1) <= message.attempt:
                del waiting.attempts[holder]
        if not waiting.attempts:
            self._open.pop((message.request_id, message.choice or 0), None)

    def _unanswered(self, message: Cancel, waiting: _Open) -> bool:
        return any(holder in waiting.attempts and not self._gone(holder) for holder in message.holders)

    async def _publish_once(self) -> None:
        messages, self._once = self._once, []
        for message in messages:
            await self._bus.publish(CANCEL(), message)

    def _own(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
