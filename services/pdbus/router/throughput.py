"""How quick a choice's answer is, by how many choices are at work; and by that how long a request will take.

Pure; time is passed in. Costs are in tokens of answers: a prompt's token counts `PROMPT_TOKEN` of one. Each choice that
ends gives one measure: its cost, its time, and how many were at work meanwhile; those of a like number are added up,
older ones fading, and forgotten after a minute. Nothing is concluded from what has not ended: a burst of prompts shows
no token for a while. Between measured numbers of choices the speed is laid as a power of their number, since it falls
as that where they share all there is; and goes on as that beyond the last one. Where only one number was measured, a
choice is taken to be as fast among more, so that what was never tried is tried rather than refused.

A request takes the time of its own cost at that speed, times a factor: the quantile `_SURE` of how much longer those
took that ended lately, beside as many as they had; and a margin, for what no measure tells beforehand. So nearly all
that are admitted end in time; and a bad moment is soon forgotten.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass

PROMPT_TOKEN = 0.25
_LEAST_COST = 1.0
_FADE = 0.95
_FORGET_S = 60.0
_SURE = 0.995
_LAST = 256
_LATELY_S = 15.0
_FACTORS = (0.8, 2.0)
"""Lasting slowness is in the speeds; more caution would leave slots empty."""
MARGIN = 1.35
"""A fleet that has become slower shows it only when answers end, by when as many again were begun. Where the fleet is
full it costs nothing: the same is computed by fewer at a time, each of them sooner."""
_UNFINISHED = 0.8
"""How much of an answer is taken to be there when its deadline ends it."""


@dataclass(slots=True)
class _Point:
    at_s: float
    cost: float = 0.0
    choice_s: float = 0.0
    """Of the time that its choices took."""
    beside: float = 0.0
    """Choices at work, in the mean over that time; added up alike."""

    @property
    def choices(self) -> float:
        return self.beside / self.choice_s

    @property
    def speed(self) -> float:
        return self.cost / self.choice_s


@dataclass(frozen=True, slots=True)
class Begun:
    """What is noted of a choice as it begins."""

    cost: float
    at_s: float
    area: float
    """Choices at work until then, summed up over time."""


class Throughput:
    def __init__(self) -> None:
        self._points: dict[int, _Point] = {}
        """By the choices' binary order of magnitude."""
        self._at_work = 0
        self._since_s = self._area = 0.0
        """Choices at work, summed up over time until then."""
        self._ratios: deque[tuple[float, float]] = deque(maxlen=_LAST)
        """When one ended, and how many times as long as expected it took."""
        self._best: tuple[float, float] | None = None
        """Seconds for each unit of cost in the quickest request of late, as if it had been alone; when it was."""

    def at_work(self, choices: int, now_s: float) -> None:
        """From now on so many are."""
        self._area += (now_s - self._since_s) * self._at_work
        self._since_s, self._at_work = now_s, choices

    def begin(self, cost: float, now_s: float) -> Begun:
        """A choice begins."""
        self.at_work(self._at_work, now_s)
        return Begun(max(cost, _LEAST_COST), now_s, self._area)

    def end(self, begun: Begun, now_s: float, *, whole: bool) -> None:
        """It ended well, or by its deadline."""
        self.at_work(self._at_work, now_s)
        taken_s = max(now_s - begun.at_s, 1e-6)
        beside = (self._area - begun.area) / taken_s
        done = begun.cost * (1 if whole else _UNFINISHED)
        if speed := self._speed(max(beside, 1.0), now_s):
            self._ratios.append((now_s, taken_s * speed / done))
        point = self._points.setdefault(int(math.log2(max(beside, 1.0))), _Point(now_s))
        point.cost = _FADE * point.cost + done
        point.choice_s = _FADE * point.choice_s + taken_s
        point.beside = _FADE * point.beside + taken_s * max(beside, 1.0)
        point.at_s = now_s
        each = taken_s / begun.cost / max(beside, 1.0)
        if whole and (self._best is None or each < self._best[0] or now_s - self._best[1] > _FORGET_S):
            self._best = each, now_s

    def raw_s(self, cost: float, choices: float, now_s: float) -> float | None:
        """How long `cost` takes one choice among so many, as measured; None: nothing is known."""
        speed = self._speed(choices, now_s)
        return None if speed is None else cost / speed

    def rate(self, choices: float, now_s: float) -> float | None:
        """Cost a second of so many together."""
        speed = self._speed(choices, now_s)
        return None if speed is None else speed * choices

    def seconds(self, raw_s: float, now_s: float) -> float:
        """What to count on."""
        ratios = sorted(ratio for at_s, ratio in self._ratios if now_s - at_s <= _LATELY_S)
        factor = ratios[int(_SURE * len(ratios))] if ratios else 1.0
        return raw_s * min(max(factor, _FACTORS[0]), _FACTORS[1]) * MARGIN

    def least_s(self, cost: float, now_s: float) -> float:
        """What it takes at best: half of what the quickest request of late took for as much."""
        if self._best is None or now_s - self._best[1] > _FORGET_S:
            return 0.0
        return self._best[0] * cost / 2

    def _speed(self, choices: float, now_s: float) -> float | None:
        """Of each."""
        self._points = {at: one for at, one in self._points.items() if now_s - one.at_s <= _FORGET_S}
        points = sorted((one.choices, one.speed) for one in self._points.values())
        if not points:
            return None
        (most, speed), power = points[0], 0.0
        for (low, quick), (high, slow) in itertools.pairwise(points):
            if choices <= most:
                break
            if high > low:
                power = math.log(slow / quick) / math.log(high / low)
            if choices <= high:
                return quick * math.pow(choices / low, power)
            most, speed = high, slow
        return speed * math.pow(max(choices / most, 1.0), min(max(power, -1.0), 0.0))
