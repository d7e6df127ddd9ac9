"""How much each worker has to do: what its card said, and what this router gave it since.

A card is up to 0.5 s old, and a burst fits in between; so own dispatches count from the moment they are made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdbus.messages.presence import Card


@dataclass(frozen=True, slots=True)
class Work:
    """Requests, and tokens of their prompts that have to be computed."""

    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Known:
    """A card, and what was this router's when it came."""

    incarnation: str
    seq: int
    mine: Work


class Loads:
    """Counted in requests, and in tokens for prompts that wait or are being read."""

    def __init__(self) -> None:
        self._mine: dict[str, Work] = {}
        self._at_card: dict[str, _Known] = {}

    def book(self, worker: str, requests: int, tokens: int) -> None:
        mine = self._mine.get(worker, Work())
        self._mine[worker] = Work(mine.requests + requests, mine.tokens + tokens)
        if self._mine[worker] == Work():
            del self._mine[worker]

    def release(self, worker: str, requests: int, tokens: int) -> None:
        """Of what was booked."""
        self.book(worker, -requests, -tokens)

    @property
    def booked(self) -> int:
        """Workers for which something is."""
        return len(self._mine)

    @property
    def idle(self) -> bool:
        return not self._mine

    def of(self, card: Card) -> Work:
        mine = self._mine.get(card.id, Work())
        known = self._at_card.get(card.id)
        if known is None or (known.incarnation, known.seq) != (card.incarnation, card.seq):
            known = self._at_card[card.id] = _Known(card.incarnation, card.seq, mine)
        load, then = card.load, known.mine
        # A prompt shrinks while it is read, which only its worker sees: of tokens the unreported ones are the least.
        return Work(
            max(load.running + load.waiting + mine.requests - then.requests, mine.requests),
            max(load.backlog_tokens + mine.tokens - then.tokens, mine.tokens - then.tokens, 0),
        )

    def of_others(self, card: Card) -> int:
        """Requests there that are not this router's."""
        return max(self.of(card).requests - self._mine.get(card.id, Work()).requests, 0)

    def forget_all_but(self, known: Iterable[str]) -> None:
        """Of workers that are not among these, nothing is kept but what is booked."""
        for worker in self._at_card.keys() - set(known):
            del self._at_card[worker]
