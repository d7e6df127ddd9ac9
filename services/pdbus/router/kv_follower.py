"""Keeps the table of prefixes up to date: workers' messages, and a snapshot where one was missed or none ever came."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping
from typing import Self

from pdbus.backoff import backoff_s
from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.context import RequestContext
from pdbus.errors import PdbusError
from pdbus.messages.presence import Card
from pdbus.messages.router import KvIndex, KvIndexWanted
from pdbus.router.kv_index import KvTable
from pdbus.router.prefixes import PrefixKeys
from pdbus.subjects import ANY, KVINDEX, KVINDEX_SNAPSHOT
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)

_SERVICES = ("prefill", "decode")
_SNAPSHOT_S = 2.0
_MOST_TRIES = 4
_REST_S = 5.0
"""After so many tries in vain a worker is left alone for so long."""


class KvFollower:
    """The index of one model's workers, followed while the scope lasts. Used from one event loop."""

    def __init__(self, bus: Bus, fleet: Fleet, model: str, rng: random.Random) -> None:
        self.table = KvTable()
        self._bus = bus
        self._fleet = fleet
        self._model = model
        self._rng = rng
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._rests: dict[str, float] = {}  # worker -> loop time before which it is not asked again
        self._open = False

    async def __aenter__(self) -> Self:
        self._registration = await self._bus.subscribe(KVINDEX(worker=ANY), self._on_message)
        self._open = True
        self._fleet.on_change(self._on_fleet)
        self._on_fleet()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        await self._registration.close()
        await cancelled(*self._asking.values())

    def matching(self, keys: PrefixKeys, cards: Iterable[Card]) -> Mapping[str, int]:
        """How many of the prompt's first pages each of these workers has, as far as is known."""
        return self.table.matching(keys, {card.id: card.incarnation for card in cards})

    def _on_message(self, message: KvIndex) -> None:
        card = self._card(message.worker)
        # Of a stranger, or of a life that the card doesn't tell of: its card will come, and a snapshot be asked for.
        if card is not None and card.incarnation == message.incarnation and not self.table.apply(message):
            self._ask(message.worker)

    def _on_fleet(self) -> None:
        """Whoever died is forgotten; whoever is new, or began a new life, is asked for what it has."""
        if not self._open:
            return
        alive = [card for card in map(self._card, (card.id for card in self._fleet.cards())) if card]
        self.table.forget_all_but(card.id for card in alive)
        for worker in self._rests.keys() - {card.id for card in alive}:
            del self._rests[worker]
        for card in alive:
            if card.state != "starting" and self.table.incarnation(card.id) != card.incarnation:
                self._ask(card.id)

    def _card(self, worker: str) -> Card | None:
        """Of a worker of this model that is not dead, and has prefixes at all: an encoder's has none."""
        card = self._fleet.card(worker)
        ours = card is not None and card.service in _SERVICES and card.model == self._model and not card.embeds
        return card if ours and self._fleet.state(worker) != "dead" else None

    def _ask(self, worker: str) -> None:
        """At most one question to a worker is under way."""
        if worker not in self._asking and asyncio.get_running_loop().time() >= self._rests.get(worker, 0.0):
            task = self._asking[worker] = asyncio.get_running_loop().create_task(self._catch_up(worker))
            task.add_done_callback(lambda _: self._asking.pop(worker, None))

    async def _catch_up(self, worker: str) -> None:
        reason = "messages went on missing"
        for attempt in range(1, _MOST_TRIES + 1):
            try:
                ctx = RequestContext.after(_SNAPSHOT_S)
                snapshot = await self._bus.call(KVINDEX_SNAPSHOT(worker=worker), KvIndexWanted(), ctx)
                card = self._card(worker)
                if card is None or (self.table.load(worker, snapshot) and card.incarnation == snapshot.incarnation):
                    return
            except PdbusError as error:
                reason = error.message
            await asyncio.sleep(backoff_s(attempt, self._rng))
        self._rests[worker] = asyncio.get_running_loop().time() + _REST_S
        log.warning("what worker %s has in its cache is not known: %s", worker, reason)
