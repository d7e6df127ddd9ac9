"""A circuit breaker for one peer: a node that fails or hangs costs a few waits, not one for each request."""

from __future__ import annotations

_FAILURES_TO_OPEN = 3
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0


class Circuit:
    """Closed (all pass) → open after three failures in a row (none pass) → after a pause one probe passes; its failure
    doubles the pause, its success closes the circuit. Times are seconds on one monotonic clock, passed in."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._probe_at_s = 0.0
        """While open: when the next probe may pass."""

    @property
    def is_open(self) -> bool:
        return self._failures >= _FAILURES_TO_OPEN

    def admits(self, now_s: float) -> bool:
        """Whether a call may be tried now. An open circuit admits one probe a pause: asking for it takes it."""
        if not self.is_open:
            return True
        if now_s < self._probe_at_s:
            return False
        self._probe_at_s = now_s + self._pause_s
        return True

    def succeeded(self) -> None:
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S

    def failed(self, now_s: float) -> None:
        self._failures += 1
        if self._failures == _FAILURES_TO_OPEN:
            self._probe_at_s = now_s + self._pause_s
        elif self.is_open:
            self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
            self._probe_at_s = now_s + self._pause_s
