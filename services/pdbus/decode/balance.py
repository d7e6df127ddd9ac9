"""When an answer should go on elsewhere because this worker is much slower than others. Pure; time is passed in.

Each worker looks at itself alone: whether a step here takes far longer than one would take at another worker with this
answer more. It has to for a while, and what was given away has to show in the steps before the next one goes: so a
moment's slowness moves nothing, few answers move at a time, and none comes back, since by then the other would have to
be far slower in turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdbus.messages.presence import Card

SLOW, CALM = 2.0, 1.4
"""Times what a step takes elsewhere: it begins to be slow, and stops to be."""
AFTER_S = 3.0
EVERY_S = 1.0
"""At most one answer in this time,"""
_STEPS = 12
"""and in so many steps: until then the time that is believed is still of the steps before."""


class Balance:
    """Of one worker."""

    def __init__(self) -> None:
        self._slow_since_s: float | None = None
        self._not_before_s = 0.0

    def look(self, step_ms: float, running: int, others: Iterable[Card], now_s: float) -> Card | None:
        """The worker to which an answer is to go now. `others`: live ones that could take it."""
        known = [card for card in others if card.step_ms > 0]
        best = min(known, key=with_one_more, default=None)
        if best is None or not running or step_ms < CALM * with_one_more(best):
            self._slow_since_s = None
            return None
        if step_ms < SLOW * with_one_more(best):
            return None
        if self._slow_since_s is None:
            self._slow_since_s = now_s
        if now_s - self._slow_since_s < AFTER_S or now_s < self._not_before_s:
            return None
        return best

    def given(self, step_ms: float, now_s: float) -> None:
        """An answer was given away."""
        self._not_before_s = now_s + max(EVERY_S, _STEPS * step_ms / 1e3)


def with_one_more(card: Card) -> float:
    """What a step there will take at most, in ms: as much longer as it has more answers in it."""
    running = card.load.running
    return card.step_ms * (running + 1) / running if running else card.step_ms
