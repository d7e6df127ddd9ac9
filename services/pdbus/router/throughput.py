"""How much the fleet does for this router, by how many choices are at work; and by that how long a request will take.

Pure; time is passed in. Costs are in tokens of answers: a prompt's token counts `PROMPT_TOKEN` of one. Each second with
work gives one measured point, the mean number of choices at work and the cost done; points of a like number are
averaged, and forgotten after a minute. Between points the rate is laid straight; beyond the last one each choice is
taken to go on as fast as there, so that what was never tried is tried rather than refused.

A request takes the time of its own cost at the speed that a choice has among so many, times a factor that is learned
from those that ended: it follows the quantile `_SURE` of their ratio (Robbins and Monro, 1951), so that nearly all of
those that are admitted end in time.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

PROMPT_TOKEN = 0.25
_WINDOW_S = 1.0
_SHARE = 0.3
_FORGET_S = 60.0
_SURE = 0.97
_STEP = 0.2
_FACTORS = (0.5, 8.0)


@dataclass(slots=True)
class _Point:
    choices: float
    rate: float
    at_s: float


class Throughput:
    def __init__(self) -> None:
        self._points: dict[int, _Point] = {}
        """By the choices' binary order of magnitude."""
        self._at_work = 0
        self._since_s = 0.0
        self._busy_s = self._choice_s = self._done = 0.0
        """Of the window under way."""
        self._factor = 1.0
        self._best: tuple[float, float] | None = None
        """Seconds for each unit of cost in the quickest request of late, and when that was."""

    def at_work(self, choices: int, now_s: float) -> None:
        """From now on so many are."""
        self._advance(now_s)
        self._at_work = choices

    def did(self, cost: float, now_s: float) -> None:
        """So much was read or written."""
        self._advance(now_s)
        self._done += cost

    def took(self, cost: float, predicted_s: float | None, taken_s: float, now_s: float) -> None:
        """A choice has ended, well or by its deadline. `predicted_s`: by `predict`, before the factor (`raw`)."""
        if predicted_s:
            late = taken_s > predicted_s * self._factor
            self._factor *= math.exp(_STEP * (_SURE if late else _SURE - 1))
            self._factor = min(max(self._factor, _FACTORS[0]), _FACTORS[1])
        each = taken_s / max(cost, 1.0)
        if self._best is None or each < self._best[0] or now_s - self._best[1] > _FORGET_S:
            self._best = each, now_s

    def raw_s(self, cost: float, choices: int, now_s: float) -> float | None:
        """How long `cost` takes one choice among so many, as measured; None: nothing is known."""
        rate = self.rate(choices, now_s)
        return None if rate is None else cost * choices / rate

    def seconds(self, raw_s: float) -> float:
        """What to count on."""
        return raw_s * self._factor

    def least_s(self, cost: float, now_s: float) -> float:
        """What it takes at best: half of what the quickest request of late took for as much."""
        if self._best is None or now_s - self._best[1] > _FORGET_S:
            return 0.0
        return self._best[0] * cost / 2

    def rate(self, choices: int, now_s: float) -> float | None:
        """Cost a second with so many choices at work."""
        self._points = {at: one for at, one in self._points.items() if now_s - one.at_s <= _FORGET_S}
        points = sorted((one.choices, one.rate) for one in self._points.values() if one.rate > 0)
        if not points:
            return None
        for (low, slow), (high, fast) in itertools.pairwise(points):
            if low <= choices <= high and low < high:
                return slow + (fast - slow) * (choices - low) / (high - low)
        known, rate = points[0] if choices <= points[0][0] else points[-1]
        return rate * choices / known

    def _advance(self, now_s: float) -> None:
        passed_s, self._since_s = now_s - self._since_s, now_s
        if not self._at_work:
            return
        self._busy_s += passed_s
        self._choice_s += passed_s * self._at_work
        if self._busy_s >= _WINDOW_S:
            self._note(self._choice_s / self._busy_s, self._done / self._busy_s, now_s)
            self._busy_s = self._choice_s = self._done = 0.0

    def _note(self, choices: float, rate: float, now_s: float) -> None:
        at = int(math.log2(max(choices, 1.0)))
        known = self._points.setdefault(at, _Point(choices, rate, now_s))
        known.choices += _SHARE * (choices - known.choices)
        known.rate += _SHARE * (rate - known.rate)
        known.at_s = now_s
