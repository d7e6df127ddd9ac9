"""Presence: telling the others that this process lives, and knowing who else does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from pdbus.bus.bus import Bus
from pdbus.bus.events import EventRegistration
from pdbus.bus.fleet_table import FleetTable, Liveness
from pdbus.context import Deadline
from pdbus.errors import DeadlineExceeded
from pdbus.messages.presence import Card
from pdbus.subjects import ANY, PRESENCE
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
TICK_S = 0.25


class Presence:
    """Publishes this process's card every half second while the scope lasts, and at once when `changed` is set.
    `make_card` gets the card's sequence."""

    def __init__(self, bus: Bus, make_card: Callable[[int], Card], changed: asyncio.Event | None = None) -> None:
        self._bus = bus
        self._make_card = make_card
        self._changed = changed or asyncio.Event()
        self._seq = 0
        self._task: asyncio.Task[None] | None = None

    async def announce(self) -> None:
        """Publishes a card at once: something changed that others wait for."""
        self._seq += 1
        card = self._make_card(self._seq)
        await self._bus.publish(PRESENCE(service=card.service, id=card.id), card)

    async def __aenter__(self) -> Presence:
        await self.announce()
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancelled(self._task)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self.announce()
            except Exception:
                # A silent process counts as dead, so one bad card must not silence it for good.
                log.exception("the presence card could not be published")


class Fleet:
    """The cards of all processes, kept while the scope lasts."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._table = FleetTable()
        self._callbacks: list[Callable[[], None]] = []
        self._waiters: set[asyncio.Event] = set()
        self._registration: EventRegistration[Card] | None = None
        self._task: asyncio.Task[None] | None = None
        self._ticked_at = time.monotonic()

    def live(self, service: str) -> tuple[Card, ...]:
        """Cards of the service's processes that were heard within the last second, by id."""
        return self._table.live(service, self._now())

    def state(self, id_: str) -> Liveness:
        """live; suspect after 1 s of silence; dead after 2 s, or if never seen."""
        return self._table.state(id_, self._now())

    def card(self, id_: str) -> Card | None:
        """The last card, also of a process that is dead since not long ago."""
        return self._table.card(id_)

    def cards(self) -> tuple[Card, ...]:
        """Every card that is remembered, of the dead too."""
        return self._table.cards()

    def on_change(self, callback: Callable[[], None]) -> None:
        """`callback` is called when a process appears, falls silent, or shows a card that differs in more than load."""
        self._callbacks.append(callback)

    async def wait_for(self, predicate: Callable[[Fleet], bool], deadline: Deadline) -> None:
        """Returns once `predicate(self)` holds; looks at every card. Raises DeadlineExceeded."""
        news = asyncio.Event()
        self._waiters.add(news)
        try:
            async with deadline.timeout():
                while not predicate(self):
                    news.clear()
                    await news.wait()
        except TimeoutError:
            raise DeadlineExceeded("the fleet did not become what was waited for") from None
        finally:
            self._waiters.discard(news)

    async def __aenter__(self) -> Fleet:
        self._registration = await self._bus.subscribe(PRESENCE(service=ANY, id=ANY), self._on_card)
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._registration:
            await self._registration.close()
        await cancelled(self._task)

    def _on_card(self, card: Card) -> None:
        self._tell(self._table.see(card, self._now()))

    async def _run(self) -> None:
        while True:
            self._ticked_at = time.monotonic()
            await asyncio.sleep(TICK_S)
            late_s = time.monotonic() - self._ticked_at - TICK_S
            if late_s > TICK_S:  # a little lateness is every busy machine's
                self._table.stalled(late_s)
            self._tell(self._table.tick(time.monotonic()))

    def _now(self) -> float:
        """No further from the last tick than one that comes in time: else all would seem silent to a process that was
        held up, until its next tick."""
        return min(time.monotonic(), self._ticked_at + 2 * TICK_S)

    def _tell(self, changed: bool) -> None:
        for news in self._waiters:
            news.set()
        if changed:
            for callback in self._callbacks:
                try:
                    callback()
                except Exception:
                    log.exception("a listener to the fleet failed")
