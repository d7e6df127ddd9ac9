"""Whether to look a prefix up or to compute it, by what this worker has measured. Pure.

Reading a page takes its bytes over the rate of reading, computing it its tokens over the rate of prefill; a look-up
that finds nothing costs a round trip. All are medians over the last few times, so that one slow moment decides nothing.
A rate that is not known yet is learned by doing; one that spoke against looking up is learned anew now and then.
"""

from __future__ import annotations

import statistics
from collections import deque

_LAST = 15
_LEAST_TOKENS = 32
"""Fewer are computed at another rate: the fixed cost of a step counts for more."""
_MISS_SHARE = 0.03
"""Of the time to compute a prompt: the most that a look-up in vain may cost."""
_READ_SHARE = 0.8
"""Of the time to compute a page: the most that reading it may cost, or it is not worth its traffic."""
_TRY_EVERY = 32
_MOMENT_S = 0.05
"""A node that has not answered by then is taken for broken; a faster worker must not do so for less."""


class Rates:
    """`page_bytes` and `page_tokens`: of one page, in all layers."""

    def __init__(self, page_bytes: int, page_tokens: int) -> None:
        self._page_bytes, self._page_tokens = page_bytes, page_tokens
        self._token_s: deque[float] = deque(maxlen=_LAST)
        self._byte_s: deque[float] = deque(maxlen=_LAST)
        self._miss_s: deque[float] = deque(maxlen=_LAST)
        self._declined = 0

    def computed(self, tokens: int, taken_s: float) -> None:
        if tokens >= _LEAST_TOKENS:
            self._token_s.append(taken_s / tokens)

    def read(self, pages: int, taken_s: float) -> None:
        self._byte_s.append(taken_s / (pages * self._page_bytes))

    def missed(self, taken_s: float) -> None:
        """A look-up found nothing."""
        self._miss_s.append(taken_s)

    def compute_s(self, tokens: int) -> float | None:
        """What computing so many takes."""
        token_s = _median(self._token_s)
        return None if token_s is None else token_s * tokens

    @property
    def page_compute_s(self) -> float | None:
        return self.compute_s(self._page_tokens)

    @property
    def page_read_s(self) -> float | None:
        byte_s = _median(self._byte_s)
        return None if byte_s is None else byte_s * self._page_bytes

    def worth_asking(self, pages: int) -> bool:
        """Whether to look for `pages` pages that would else be computed."""
        if not pages:
            return False
        compute_s = self.page_compute_s
        if compute_s is None:
            return True
        read_s, miss_s = self.page_read_s or 0.0, _median(self._miss_s) or 0.0
        if read_s <= _READ_SHARE * compute_s and miss_s <= _MISS_SHARE * compute_s * pages:
            return True
        self._declined += 1
        return self._declined % _TRY_EVERY == 0

    def patience_s(self, pages: int, longest_s: float) -> float:
        """How long to wait for `pages` pages: as long as reading them pays, but for a moment. `longest_s`: as long as
        that isn't known."""
        compute_s = self.page_compute_s
        return longest_s if compute_s is None else max(_READ_SHARE * compute_s * pages, _MOMENT_S)


def _median(taken: deque[float]) -> float | None:
    return statistics.median(taken) if taken else None
