"""Whether an engine's thread hangs, while the event loop beside it lives and could go on saying that all is well.

The thread counts its steps and what they take. The event loop looks at the count a few times a second: where it stands
still for much longer than such a step has taken lately, the worker says that it is hung, and routers let its answers go
on elsewhere. Should the thread go on after all, it is ready again. After far longer it is given up: a thread can't be
ended from outside, so the process ends, to be started anew. Pure; time is passed in.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Literal

LOOK_S = 0.25
FLOOR_S = 1.25
"""Less is never taken for hanging: on a machine that has too much to do, any step may be late once."""
FIRST_USE_S = 60.0
"""While what runs was never run before: kernels are loaded or compiled, weights read from disk."""
_FIRST_USES = 4
"""Each may run what those before it did not: of one row, of many."""
_MOST_USED = 128
_TIMES = 10.0
"""what the slowest step of its kind and size took lately."""
_FADE = 0.99
_GIVE_UP_TIMES, _GIVE_UP_S = 3.0, 5.0


class Progress:
    """Written by the engine's thread, read by the event loop."""

    def __init__(self) -> None:
        self.count = 0
        """Steps finished: it stands still only while the thread does."""
        self.waits = True
        """It does nothing, or waits for something that comes or is given up by itself: that is no hanging."""
        self._slowest_s: dict[str, float] = {}
        """By kind, for each unit of size, of late: older ones count less and less."""
        self._used: dict[Hashable, int] = {}
        """How often, up to `_FIRST_USES`, and lately used last."""
        self._kind, self._size, self._first_use, self._since_s = "", 1, False, 0.0

    def begin(self, kind: str, now_s: float, *, size: int = 1, uses: Iterable[Hashable] = ()) -> None:
        """Steps of this kind begin, and follow each other until the next `begin`. `size`: what they take grows no
        faster than this. `uses`: versions, which are slow the first few times in each kind."""
        self._kind, self._size, self._since_s = kind, size, now_s
        self._first_use = sum(self._first((kind, use)) for use in set(uses)) > 0  # all of them, so that each is counted
        self.count += 1
        self.waits = False

    def made(self, now_s: float) -> None:
        """A step is done."""
        taken_s, self._since_s = (now_s - self._since_s) / self._size, now_s
        self.count += 1
        if not self._first_use:
            self._slowest_s[self._kind] = max(taken_s, _FADE * self._slowest_s.get(self._kind, 0.0))

    def goes_on(self, now_s: float) -> None:
        """After `waits`: that is no part of the step that is under way."""
        self._since_s, self.waits = now_s, False

    def _first(self, use: Hashable) -> bool:
        times = self._used.pop(use, 0)
        self._used[use] = min(times + 1, _FIRST_USES)
        if len(self._used) > _MOST_USED:
            del self._used[next(iter(self._used))]
        return times < _FIRST_USES

    @property
    def limit_s(self) -> float:
        """If the step under way takes longer, the thread hangs."""
        if self._first_use:
            return FIRST_USE_S
        return max(FLOOR_S, _TIMES * self._slowest_s.get(self._kind, 0.0) * self._size)


Verdict = Literal["well", "hung", "given up"]


class Standstill:
    """Of one thread."""

    def __init__(self) -> None:
        self.stood_s = 0.0
        self._count = -1
        self._looked_s: float | None = None

    def look(self, progress: Progress, now_s: float) -> Verdict:
        """Time in which nobody looked counts only in part: then this process was stopped, or had no core to run on, and
        so had the thread."""
        since_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, 2 * LOOK_S)
        self._looked_s = now_s
        if progress.waits or progress.count != self._count:
            self._count, self.stood_s = progress.count, 0.0
            return "well"
        self.stood_s += since_s
        limit_s = progress.limit_s
        if self.stood_s < limit_s:
            return "well"
        return "hung" if self.stood_s < _GIVE_UP_TIMES * limit_s + _GIVE_UP_S else "given up"
