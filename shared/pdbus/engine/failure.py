"""When to try again what failed: ever later. Pure; time is passed in."""

from __future__ import annotations

import random
from dataclasses import dataclass

_RETRY_S = 0.5
_LONGEST_RETRY_S = 10.0


class NotYet(Exception):
    """Of loading a version: it will cost less a little later."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Of loading a wanted version: it is tried again, ever later."""

    count: int
    not_before_s: float

    @classmethod
    def after(cls, earlier: Failure | None, now_s: float) -> Failure:
        count = earlier.count + 1 if earlier else 1
        wait_s = min(_RETRY_S * 2.0 ** (count - 1), _LONGEST_RETRY_S) * random.uniform(0.5, 1.0)  # noqa: S311
        return cls(count, now_s + wait_s)
