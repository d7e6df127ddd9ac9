"""Which workers take a request. Pure: cards and counts come in, ids go out.

Prefill: rendezvous hashing of the prompt's first page, so that equal beginnings meet the same page cache, with the load
of each worker bounded to 1.25 times the mean ("Consistent Hashing with Bounded Loads", Mirrokni et al. 2016). Decode:
the least loaded, ties at random. Liveness is decided before either.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdbus.messages.common import Digest
from pdbus.messages.presence import Card

LOAD_BOUND = 1.25


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode worker that understand each other's pages."""

    prefill: str
    decode: str
    compute_class: str


class Loads:
    """How much each worker has to do: what its card said, and what this router gave it since.

    A card is up to 0.5 s old, and a burst fits in between; so own dispatches count from the moment they are made."""

    def __init__(self) -> None:
        self._mine: Counter[str] = Counter()
        self._at_card: dict[str, tuple[str, int, int]] = {}  # worker -> (incarnation, card's seq, mine at that time)

    def book(self, *workers: str) -> None:
        self._mine.update(workers)

    def release(self, *workers: str) -> None:
        self._mine.subtract(workers)
        for worker in workers:
            if self._mine[worker] <= 0:
                del self._mine[worker]

    @property
    def idle(self) -> bool:
        return not self._mine

    def of(self, card: Card) -> int:
        mine = self._mine[card.id]
        known = self._at_card.get(card.id)
        if known is None or known[:2] != (card.incarnation, card.seq):
            known = self._at_card[card.id] = (card.incarnation, card.seq, mine)
        reported = card.load.running + card.load.waiting
        return max(reported + mine - known[2], mine)

    def forget_all_but(self, known: Iterable[str]) -> None:
        """Of workers that are not among these, nothing is kept but what is booked."""
        for worker in self._at_card.keys() - set(known):
            del self._at_card[worker]


def usable(cards: Iterable[Card], model: str, root: Digest) -> list[Card]:
    return [card for card in cards if card.state == "ready" and card.model == model and root in card.roots]


def choose_pair(
    page: bytes,
    prefills: Sequence[Card],
    decodes: Sequence[Card],
    loads: Loads,
    *,
    prefer_class: str | None = None,
    avoid: frozenset[str] = frozenset(),
    pages: int = 0,
    rng: random.Random,
) -> Pair | None:
    """A pair of usable workers, or None. `avoid`: workers that just failed, used only if there are no others.

    `pages`: what the sequence will need; decode workers without that many free are used only if all are so."""
    kinds = [(card.page_format, card.compute_class) for card in prefills]
    common = set(kinds) & {(card.page_format, card.compute_class) for card in decodes}
    if not common:
        return None
    # One class for all attempts of a request where possible: numbers of another differ in the last digits.
    kind = max(common, key=lambda found: (found[1] == prefer_class, kinds.count(found), found))
    prefills, decodes = _of_kind(prefills, kind, avoid), _of_kind(decodes, kind, avoid)
    prefill = bounded_rendezvous(page, {card.id: loads.of(card) for card in prefills})
    roomy = [card for card in decodes if card.load.pages_total - card.load.pages_used >= pages] or list(decodes)
    least = min(map(loads.of, roomy))
    decode = rng.choice([card for card in roomy if loads.of(card) == least])
    return Pair(prefill, decode.id, kind[1])


def bounded_rendezvous(key: bytes, loads: Mapping[str, int]) -> str:
    """The highest-scored worker whose load stays within 1.25 times the mean (rounded up) with this request added."""
    most = math.ceil(LOAD_BOUND * (sum(loads.values()) + 1) / len(loads))
    ranked = sorted(loads, key=lambda worker: hashlib.sha256(key + worker.encode()).digest(), reverse=True)
    return next(worker for worker in ranked if loads[worker] + 1 <= most)


def _of_kind(cards: Sequence[Card], kind: tuple[str, str], avoid: frozenset[str]) -> list[Card]:
    same = [card for card in cards if (card.page_format, card.compute_class) == kind]
    return [card for card in same if card.id not in avoid] or same
