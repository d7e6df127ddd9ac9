"""Who is there: the last card of every process, and how fresh it is. Pure: time is passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from pdbus.messages.presence import Card

Liveness = Literal["live", "suspect", "dead"]

SUSPECT_AFTER_S = 1.0
DEAD_AFTER_S = 2.0
FORGET_AFTER_S = 300.0
REMEMBERED_LIVES = 8
"""Former incarnations of a process whose late cards are known as such."""


@dataclass(slots=True)
class _Seen:
    card: Card
    at_s: float
    liveness: Liveness = "live"
    former: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_LIVES))


class FleetTable:
    """Cards by process id. Nothing older ever replaces something newer."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}  # in the order of ids

    def see(self, card: Card, now_s: float) -> bool:
        """Takes a card; returns whether others should hear of it (all but changes of load and progress count).

        A card of a new incarnation replaces the old one, whatever their sequence numbers. A card of a former
        incarnation, or one that is not newer than the last, is ignored."""
        seen = self._seen.get(card.id)
        if seen is None:
            self._seen[card.id] = _Seen(card, now_s)
            self._seen = dict(sorted(self._seen.items()))
            return True
        last = seen.card
        if card.incarnation in seen.former:
            return False
        if card.incarnation == last.incarnation:
            if card.seq <= last.seq:
                return False
        else:
            seen.former.append(last.incarnation)
        changed = seen.liveness != "live" or _essence(card) != _essence(last)
        seen.card, seen.at_s, seen.liveness = card, now_s, "live"
        return changed

    def tick(self, now_s: float) -> bool:
        """Notes who has fallen silent and drops who has been for long; returns whether anybody's state changed."""
        changed = False
        for id_, seen in list(self._seen.items()):
            liveness = self.state(id_, now_s)
            changed |= liveness != seen.liveness
            seen.liveness = liveness
            if now_s - seen.at_s > FORGET_AFTER_S:
                del self._seen[id_]
        return changed

    def stalled(self, seconds: float) -> None:
        """This process itself did not run for so long: nobody's silence in that time means anything."""
        for seen in self._seen.values():
            seen.at_s += seconds

    def state(self, id_: str, now_s: float) -> Liveness:
        """dead, too, if it was never seen."""
        seen = self._seen.get(id_)
        age_s = now_s - seen.at_s if seen else DEAD_AFTER_S
        if age_s >= DEAD_AFTER_S:
            return "dead"
        return "suspect" if age_s > SUSPECT_AFTER_S else "live"

    def card(self, id_: str) -> Card | None:
        seen = self._seen.get(id_)
        return seen.card if seen else None

    def live(self, service: str, now_s: float) -> tuple[Card, ...]:
        """Cards of the service's live processes, by id."""
        return tuple(
            seen.card
            for seen in self._seen.values()
            if seen.card.service == service and now_s - seen.at_s <= SUSPECT_AFTER_S
        )

    def cards(self) -> tuple[Card, ...]:
        """Every card that is remembered, of the dead too, by id."""
        return tuple(seen.card for seen in self._seen.values())


def _essence(card: Card) -> tuple[object, ...]:
    return (
        card.service,
        card.incarnation,
        card.state,
        card.model,
        card.roots,
        card.bulk,
        card.compute_class,
        card.page_format,
        card.url,
        card.detail,
    )
