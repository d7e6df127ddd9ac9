"""Versions in another precision that are being made: which of them a worker waits for. Pure; time is passed in."""

from __future__ import annotations

from pdbus.messages.common import Digest
from pdbus.weights.history import History

_LEAST_S, _BYTES_PER_S, _MOST_S = 5.0, 25e6, 300.0
"""How long one is waited for: by the size of the version in fp32, on a busy machine."""


class Coming:
    """Of one precision, for one worker.

    After a wait in vain none is waited for until that version, or a later one, was made: where weights change faster
    than they are converted, or can't be, they have to be loaded all the same."""

    def __init__(self, precision: str) -> None:
        self._precision = precision
        self._awaited: tuple[Digest, int, float] | None = None
        """(version in fp32, its sequence in the log, until when) of what was waited for last."""
        self._in_vain = 0
        """The sequence of what was, last."""

    def is_worth_it(self, history: History, root: Digest, nbytes: int, now_s: float) -> bool:
        """Whether to wait (on) for what is made of `root`, of `nbytes` in fp32."""
        roots, made = history.roots, history.conversions.made
        if self._awaited and self._awaited[0] != root:
            self._settle(history.derived(self._awaited[0], self._precision) is not None)
        made_s = [source for source, precision in made if precision == self._precision and source in roots]
        if self._in_vain > max((roots[source].at.seq for source in made_s), default=0):
            return False
        if root not in history.wanted or not history.is_due(root, self._precision):
            return False
        if self._awaited is None:
            limit_s = min(_LEAST_S + nbytes / _BYTES_PER_S, _MOST_S)
            self._awaited = root, roots[root].at.seq, now_s + limit_s
        if now_s < self._awaited[2]:
            return True
        self._settle(False)
        return False

    def _settle(self, came: bool) -> None:
        assert self._awaited
        if not came:
            self._in_vain = self._awaited[1]
        self._awaited = None
