"""The router's view of the workers: who is there, who can take a request, and what each has to do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from pdbus.bus.presence import Fleet
from pdbus.kv.format import PAGE_TOKENS
from pdbus.messages.common import Digest
from pdbus.messages.presence import Card
from pdbus.router.loads import Loads
from pdbus.router.placement import Kind, Matching, Pair, Wanted, choose_kind, choose_pair, usable


class Booking:
    """What one attempt counts for at its workers, from now on."""

    def __init__(self, loads: Loads, pair: Pair) -> None:
        self._loads = loads
        self._decode = pair.decode
        self._reading: tuple[str, int, int] | None = (
            (pair.decode, 0, pair.rest_tokens) if pair.prefill is None else (pair.prefill, 1, pair.rest_tokens)
        )
        loads.book(self._decode, 1, 0)
        loads.book(*self._reading)

    def prompt_read(self) -> None:
        """The first token is here: nothing is left to be computed of the prompt."""
        reading, self._reading = self._reading, None
        if reading:
            self._loads.release(*reading)

    def end(self) -> None:
        self.prompt_read()
        self._loads.release(self._decode, 1, 0)


class Workers:
    """Used from one event loop."""

    def __init__(self, fleet: Fleet, model: str, matching: Matching, rng: random.Random) -> None:
        self.fleet = fleet
        self._model = model
        self._matching = matching
        self._rng = rng
        self._loads = Loads()
        fleet.on_change(lambda: self._loads.forget_all_but(card.id for card in fleet.cards()))

    def pair(self, root: Digest, wanted: Wanted) -> Pair | None:
        """Workers that hold `root` and understand each other, or None."""
        prefills, decodes = (self._usable(service, root) or self._able(service) for service in ("prefill", "decode"))
        return choose_pair(wanted, prefills, decodes, self._loads, self._matching, self._rng)

    def alone(self, decode: str, root: Digest, tokens: int) -> Pair | None:
        """That decode worker for an answer that has moved to it: all but the last page of its tokens is there."""
        card = next((card for card in self._usable("decode", root) if card.id == decode), None)
        if card is None:
            return None
        there = (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
        return Pair(None, decode, card.compute_class, there, tokens - there)

    def kind(self, root: Digest) -> Kind | None:
        """What requests of this root are computed by just now; None if nobody serves it."""
        return choose_kind(self._usable("prefill", root), self._usable("decode", root))

    def slots(self) -> int | None:
        """How many choices this router may have at work: what the fleet's workers take at once, less what others have
        there, but no less than its part among the routers. None: a worker doesn't say."""
        cards = [card for kind in ("prefill", "decode") for card in self.fleet.live(kind) if card.model == self._model]
        cards = [card for card in cards if card.state == "ready"]
        if not cards or not all(card.load.slots for card in cards):
            return None
        total = sum(card.load.slots for card in cards)
        others = sum(self._loads.of_others(card) for card in cards if card.service == "decode")
        routers = sum(card.model == self._model for card in self.fleet.live("router"))
        return max(total - others, total // max(routers, 1))

    def encoders(self, root: Digest, *, or_load: bool = False) -> list[Card]:
        """The prefill workers that embed texts on `root`. `or_load`: where none does, those that could load it."""
        found = self._usable("prefill", root) or (self._able("prefill") if or_load else [])
        return [card for card in found if card.embeds]

    def gone(self, worker: str, incarnation: str | None = None) -> bool:
        """Dead, hung, or restarted since it was `incarnation`: what it held is lost."""
        card = self.fleet.card(worker)
        if card is not None and card.state == "hung":
            return True
        if incarnation is not None and card is not None and card.incarnation != incarnation:
            return True
        return self.fleet.state(worker) == "dead"

    @contextmanager
    def booked(self, pair: Pair) -> Iterator[Booking]:
        """Counts one request at its workers until it ends."""
        booking = Booking(self._loads, pair)
        try:
            yield booking
        finally:
            booking.end()

    @property
    def bookings(self) -> int:
        """Workers at which something is booked."""
        return self._loads.booked

    @property
    def idle(self) -> bool:
        """Nothing is booked anywhere."""
        return not self.bookings

    def _usable(self, service: str, root: Digest) -> list[Card]:
        return usable(self.fleet.live(service), self._model, root)

    def _able(self, service: str) -> list[Card]:
        """Those that serve at all: a version that no ref names any more is loaded by whoever is asked for it."""
        cards = self.fleet.live(service)
        return [card for card in cards if card.state == "ready" and card.model == self._model and card.roots]
