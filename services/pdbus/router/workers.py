"""The router's view of the workers: who is there, who can take a request, and what each has to do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from pdbus.bus.presence import Fleet
from pdbus.messages.common import Digest
from pdbus.messages.presence import Card
from pdbus.router.placement import Loads, Pair, choose_pair, usable


class Workers:
    """Used from one event loop."""

    def __init__(self, fleet: Fleet, model: str, rng: random.Random) -> None:
        self.fleet = fleet
        self._model = model
        self._rng = rng
        self._loads = Loads()
        fleet.on_change(lambda: self._loads.forget_all_but(card.id for card in fleet.cards()))

    def pair(
        self, root: Digest, page: bytes, *, prefer_class: str | None, avoid: frozenset[str], pages: int
    ) -> Pair | None:
        """Two workers that hold `root` and understand each other, or None."""
        prefills, decodes = self._usable("prefill", root), self._usable("decode", root)
        return choose_pair(
            page,
            prefills,
            decodes,
            self._loads,
            prefer_class=prefer_class,
            avoid=avoid,
            pages=pages,
            rng=self._rng,
        )

    def kind(self, root: Digest) -> Card | None:
        """A prefill worker's card whose page format and compute class a decode worker shares; None if none serves."""
        decodes = {(card.page_format, card.compute_class) for card in self._usable("decode", root)}
        fitting = [c for c in self._usable("prefill", root) if (c.page_format, c.compute_class) in decodes]
        return min(fitting, key=lambda card: (card.compute_class, card.page_format), default=None)

    def encoders(self, root: Digest) -> list[Card]:
        """The prefill workers that embed texts on `root`."""
        return [card for card in self._usable("prefill", root) if card.embeds]

    def gone(self, worker: str, incarnation: str | None = None) -> bool:
        """Dead, or restarted since it was `incarnation`: what it held is lost."""
        card = self.fleet.card(worker)
        if incarnation is not None and card is not None and card.incarnation != incarnation:
            return True
        return self.fleet.state(worker) == "dead"

    @contextmanager
    def booked(self, pair: Pair) -> Iterator[None]:
        """Counts one request on both until it ends."""
        self._loads.book(pair.prefill, pair.decode)
        try:
            yield
        finally:
            self._loads.release(pair.prefill, pair.decode)

    @property
    def idle(self) -> bool:
        """Nothing is booked anywhere."""
        return self._loads.idle

    def _usable(self, service: str, root: Digest) -> list[Card]:
        return usable(self.fleet.live(service), self._model, root)
