"""How well each worker would do with one prompt. Pure.

A worker is rated by the tokens that it would have to compute until the answer's first one: what waits there, and what
of the prompt its cache lacks. Affinity is bounded: who has more requests than 1.25 times the mean is passed over
("Consistent Hashing with Bounded Loads", Mirrokni et al. 2016), however much of the prompt it has.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence

from pdbus.messages.presence import Card
from pdbus.router.loads import Loads
from pdbus.router.prefixes import PrefixKeys

LOAD_BOUND = 1.25
ANSWER_TOKENS = 64
"""What an answer that a worker is writing costs another one there, in tokens of a prompt: a step for more sequences
takes longer, and an answer of usual length has many. So a page or two don't draw all requests to one worker."""


class Ranking:
    """Of `cards` for one prompt of `tokens` tokens. `pages`: how many of its first pages who has."""

    def __init__(
        self,
        tokens: int,
        keys: PrefixKeys,
        cards: Iterable[Card],
        loads: Loads,
        pages: Mapping[str, int],
        rng: random.Random,
    ) -> None:
        self._tokens = tokens
        self._keys = keys
        self._work = {card.id: loads.of(card) for card in cards}
        self._pages = pages
        self._rng = rng

    def matched(self, card: Card) -> int:
        """Tokens of the prompt that it has."""
        return self._pages.get(card.id, 0) * self._keys.page_tokens

    def local(self, decodes: Sequence[Card], *, alone: bool) -> Card | None:
        """The decode worker that should read the prompt itself; None: somebody else should.

        `alone`: there is nobody else."""
        fitting = [card for card in self._bounded(decodes) if alone or self._sooner_local(card)]
        return min(fitting, key=lambda card: (self._answering(card), self._rng.random()), default=None)

    def prefill(self, prefills: Sequence[Card]) -> Card:
        near = self._bounded(prefills)
        if any(map(self.matched, near)):
            return min(near, key=self._order)
        # Nobody knows it. By rendezvous equal beginnings that come at once are computed once; to wait for that is worth
        # no more than the prompt itself.
        most = min(map(self._cost, near)) + self._tokens
        return rendezvous(self._keys.beginning, [card for card in near if self._cost(card) <= most])

    def least_loaded(self, decodes: Sequence[Card]) -> Card:
        """Ties at random."""
        work = self._work
        return min(decodes, key=lambda card: (work[card.id].requests, work[card.id].tokens, self._rng.random()))

    def _answering(self, card: Card) -> int:
        """Who reads the prompt will write the answer too."""
        return self._cost(card) + ANSWER_TOKENS * self._work[card.id].requests

    def _cost(self, card: Card) -> int:
        return self._work[card.id].tokens + self._tokens - self.matched(card)

    def _sooner_local(self, card: Card) -> bool:
        """Its threshold is as of its card: what waited there then is in it, what was given to it since is not."""
        since = max(self._work[card.id].tokens - card.load.backlog_tokens, 0)
        return since + self._tokens - self.matched(card) <= card.local_tokens

    def _order(self, card: Card) -> tuple[int, int, float]:
        return self._cost(card), self._work[card.id].requests, self._rng.random()

    def _bounded(self, cards: Sequence[Card]) -> list[Card]:
        """At least one, since not all can have more than the mean."""
        requests = [self._work[card.id].requests for card in cards]
        most = math.ceil(LOAD_BOUND * sum(requests) / len(requests))
        return [card for card, count in zip(cards, requests, strict=True) if count <= most]


def rendezvous(key: bytes, cards: Sequence[Card]) -> Card:
    """Equal keys meet; who leaves moves only its own keys (Thaler and Ravishankar, 1998)."""
    return max(cards, key=lambda card: hashlib.sha256(key + card.id.encode()).digest())
