"""Up to how many tokens a decode worker reads a prompt sooner than a prefill worker's KV would reach it. Pure.

Both ways take a fixed time and one for each token that has to be computed. For a hand-over the fixed one is what
reserving, sending and checking cost; the other one is the prefill worker's. Each way's line is laid through its last
few times by the median of the slopes between all pairs (Theil 1950, Sen 1968): one slow moment decides nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from dataclasses import dataclass

from pdbus.messages.presence import WHOLE_PROMPTS

_LAST = 15
_START_TOKENS = 32
"""Less than any hand-over costs: read here before anything is known, and whatever was measured, so that there is
always something to measure."""
_FURTHER = 2
"""Times the longest prompt that was read here lately: so far its time is believed to be known."""
_TRY_EVERY = 32
"""After so many hand-overs with no prompt read here between them, one is: what is never tried is never known."""


@dataclass(frozen=True, slots=True)
class _Line:
    fixed_s: float
    token_s: float

    def at(self, tokens: int) -> float:
        return self.fixed_s + self.token_s * tokens


class Threshold:
    """`page_tokens`: its grain. `most_tokens`: it is never above, for the sake of answers that are being written.
    `colocated`: it is not asked for, every prompt is read here."""

    def __init__(self, page_tokens: int, most_tokens: int, *, colocated: bool = False) -> None:
        self._page_tokens, self._most_tokens, self._colocated = page_tokens, most_tokens, colocated
        self._local: deque[tuple[int, float]] = deque(maxlen=_LAST)
        self._remote: deque[tuple[int, float]] = deque(maxlen=_LAST)
        self._untried = 0

    def local(self, tokens: int, taken_s: float) -> None:
        """So many tokens were computed here before a first new one."""
        self._local.append((tokens, taken_s))
        self._untried = 0

    def handed_over(self, tokens: int, taken_s: float) -> None:
        """So many were computed elsewhere; from the reservation to the final frame."""
        self._remote.append((tokens, taken_s))
        self._untried += 1

    def tokens(self, backlog: int) -> int:
        """A prompt of which at most this many are to be computed is to be read here, behind `backlog` tokens of others
        that are waiting to be."""
        if self._colocated:
            return WHOLE_PROMPTS
        return max(self._alone() - backlog, 0)

    def _alone(self) -> int:
        if self._untried >= _TRY_EVERY:
            return self._most_tokens
        least = min(_START_TOKENS, self._most_tokens)
        if not self._local or not self._remote:
            return least
        local = _line(self._local, 0.0)
        remote = _line(self._remote, local.token_s)
        known = _FURTHER * max(tokens for tokens, _ in self._local)
        most = min(known, self._most_tokens) // self._page_tokens * self._page_tokens
        sooner = (n for n in range(most, least, -self._page_tokens) if local.at(n) <= remote.at(n))
        return next(sooner, least)


def _line(measured: deque[tuple[int, float]], token_s: float) -> _Line:
    """`token_s`: of a token, where all were equally many."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(measured, 2) if a[0] != b[0]]
    slope = max(statistics.median(slopes), 0.0) if slopes else token_s
    return _Line(statistics.median(taken_s - slope * tokens for tokens, taken_s in measured), slope)
