"""Which workers take a request. Pure: cards, counts and matched pages come in, ids go out.

Liveness and version first, then the kind; then who reads the prompt: a decode worker itself where its card says that
this is sooner done than a hand-over, or where there is nobody else, else the best prefill worker (ranking.py). The
answer is written by whoever reads the prompt itself, else by the least loaded one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from pdbus.messages.common import Digest
from pdbus.messages.presence import WHOLE_PROMPTS, Card
from pdbus.router.loads import Loads
from pdbus.router.prefixes import PrefixKeys
from pdbus.router.ranking import Ranking

Matching: TypeAlias = Callable[[PrefixKeys, Sequence[Card]], Mapping[str, int]]
"""How many of the prompt's first pages each worker has; those with none may be left out."""


class Kind(NamedTuple):
    """Workers of one kind understand each other's pages, and compute alike to the bit."""

    page_format: str
    compute_class: str


@dataclass(frozen=True, slots=True)
class Pair:
    """Who reads the prompt, and who writes the answer."""

    prefill: str | None
    """None: the decode worker does both."""
    decode: str
    compute_class: str
    matched_tokens: int = 0
    """Of the prompt, in the cache of the worker that reads it, as far as is known."""
    rest_tokens: int = 0
    """What that worker will have to compute."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks of its workers."""

    tokens: int
    """To be read: the prompt, and what was delivered already."""
    keys: Callable[[Kind], PrefixKeys]
    pages: int = 0
    """What the sequence will need; decode workers without that many free are used only if all are so."""
    shares: bool = True
    """It may use pages that are cached."""
    prefer_class: str | None = None
    avoid: frozenset[str] = frozenset()
    """Workers that just failed, used only if there are no others."""
    broken: frozenset[str] = frozenset()
    """Those of them that were not merely full: rather than by them alone, prompts are read by decode workers."""


def usable(cards: Iterable[Card], model: str, root: Digest) -> list[Card]:
    """Those that can take a request of this root."""
    return [card for card in cards if card.state == "ready" and card.model == model and root in card.roots]


def kind_of(card: Card) -> Kind:
    return Kind(card.page_format, card.compute_class)


def choose_kind(prefills: Sequence[Card], decodes: Sequence[Card], prefer_class: str | None = None) -> Kind | None:
    """A kind that has decode workers, and best prefill workers too. None if there is none.

    One class for all attempts of a request where possible: numbers of another differ in the last digits."""
    reading = [*map(kind_of, prefills), *(kind_of(card) for card in decodes if card.local_tokens == WHOLE_PROMPTS)]

    def rank(kind: Kind) -> tuple[bool, int, Kind]:
        return kind.compute_class == prefer_class, reading.count(kind), kind

    return max(set(map(kind_of, decodes)), key=rank, default=None)


def choose_pair(
    wanted: Wanted,
    prefills: Sequence[Card],
    decodes: Sequence[Card],
    loads: Loads,
    matching: Matching,
    rng: random.Random,
) -> Pair | None:
    """Workers among these usable ones, or None."""
    kind = choose_kind(prefills, decodes, wanted.prefer_class)
    if kind is None:
        return None
    prefills, decodes = _of_kind(prefills, kind, wanted.avoid), _of_kind(decodes, kind, wanted.avoid)
    if wanted.broken.issuperset(card.id for card in prefills) and not wanted.avoid & {card.id for card in decodes}:
        prefills = []
    keys = wanted.keys(kind)
    readers = [*prefills, *(card for card in decodes if card.local_tokens or not prefills)]
    pages = matching(keys, readers) if wanted.shares else {}
    ranking = Ranking(wanted.tokens, keys, (*prefills, *decodes), loads, pages, rng)
    roomy = [card for card in decodes if card.load.pages_total - card.load.pages_used >= wanted.pages] or decodes
    if local := ranking.local(roomy, alone=not prefills):
        return _pair(wanted, kind, None, local, ranking.matched(local))
    prefill = ranking.prefill(prefills)
    return _pair(wanted, kind, prefill.id, ranking.least_loaded(roomy), ranking.matched(prefill))


def _pair(wanted: Wanted, kind: Kind, prefill: str | None, decode: Card, matched: int) -> Pair:
    return Pair(prefill, decode.id, kind.compute_class, matched, wanted.tokens - matched)


def _of_kind(cards: Sequence[Card], kind: Kind, avoid: frozenset[str]) -> list[Card]:
    same = [card for card in cards if kind_of(card) == kind]
    return [card for card in same if card.id not in avoid] or same
