"""Which needed peers have been missing for too long. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Absence:
    """Counts from the first look at which a needed peer was not live. One that was never seen is not live."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._since_s: dict[str, float] = {}

    def missing(self, needed: Iterable[str], live: Callable[[str], bool], now_s: float) -> list[str]:
        """Those of `needed` that have not been live for `after_s`; peers not needed any more are forgotten."""
        self._since_s = {peer: self._since_s.get(peer, now_s) for peer in set(needed) if not live(peer)}
        return [peer for peer, since_s in self._since_s.items() if now_s - since_s >= self._after_s]
