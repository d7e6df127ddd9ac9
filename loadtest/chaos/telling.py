"""What is said while a run lasts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.chaos.judging import Judged
from loadtest.chaos.strikes import Strikes


@dataclass(frozen=True)
class Telling:
    """Who only saw the end of half an hour would learn nothing from one that breaks off."""

    began_s: float
    judged: list[Judged]
    strikes: Strikes
    troubles: list[str]
    say: Callable[[str], None]

    def struck(self) -> None:
        last, counts = self.strikes.all[-1], Counter(one.what for one in self.judged)
        back = "never ready again" if last.back_s is None else f"ready after {last.back_s - last.at_s:.1f} s"
        told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
        self.say(f"{last.at_s - self.began_s:.0f} s: {last.way} {last.process}, {back}; so far {told}")

    def trouble(self, error: Exception) -> None:
        self.troubles.append(f"a strike failed: {named(error)}")
        self.say(self.troubles[-1])


def named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
