"""What the clients were told, held against what they should have been told. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from loadtest.chaos.asking import Told
from loadtest.chaos.questions import Right
from loadtest.chaos.strikes import Strike

RIGHT, REFUSED, FAILED, WRONG, DOUBLED, MISSING = "right", "refused", "failed", "wrong", "doubled", "missing"
OUTCOMES = (RIGHT, REFUSED, FAILED, WRONG, DOUBLED, MISSING)


def outcome(told: Told, right: Right) -> str:
    """What was told before a refusal has to be right, too."""
    if told.refused or told.failed:
        begun = all(tuple(part) == wanted[: len(part)] for part, wanted in zip(told.parts, right.ids, strict=False))
        begun = begun and all(map(str.startswith, right.texts, told.texts))
        return WRONG if not begun else REFUSED if told.refused else FAILED
    if told.ids == right.ids:
        return RIGHT if tuple(told.texts) == right.texts else WRONG
    lengths = [(len(part), len(wanted)) for part, wanted in zip(told.ids, right.ids, strict=False)]
    if len(told.ids) != len(right.ids) or any(got < wanted for got, wanted in lengths):
        return MISSING
    return DOUBLED if any(got > wanted for got, wanted in lengths) else WRONG


@dataclass(frozen=True)
class Judged:
    """One request, and of what it was told only what is needed yet: a run has tens of thousands."""

    what: str
    sent_s: float
    end_s: float
    last_s: float
    tries: int
    tokens: int
    pauses: tuple[tuple[float, float], ...]
    broken_s: tuple[float, ...]
    reason: str
    evidence: str

    @classmethod
    def of(cls, told: Told, right: Right) -> Self:
        what = outcome(told, right)
        return cls(
            what,
            told.sent_s,
            told.end_s,
            told.last_s,
            told.tries,
            sum(map(len, told.parts)),
            tuple(told.pauses),
            tuple(told.broken_s),
            (told.failed or told.refused)[:160],
            _difference(told, what, right) if what in (WRONG, DOUBLED, MISSING) else "",
        )


@dataclass
class Judgement:
    counts: Counter[str] = field(default_factory=Counter)
    struck: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (what is told of a strike, outcome): of requests under way between a strike and the return."""
    reasons: Counter[str] = field(default_factory=Counter)
    evidence: list[str] = field(default_factory=list)

    @property
    def completed(self) -> float:
        """The share of all requests that were answered right."""
        return self.counts[RIGHT] / max(self.counts.total(), 1)

    @property
    def sound(self) -> bool:
        return all(self.counts[bad] == 0 for bad in (FAILED, WRONG, DOUBLED, MISSING)) and self.completed >= 0.999


def judge(all: Sequence[Judged], strikes: Sequence[Strike], tell: Callable[[Strike], Sequence[str]]) -> Judgement:
    """`tell`: under which names a strike is counted."""
    found = Judgement()
    for one in all:
        found.counts[one.what] += 1
        if one.reason:
            found.reasons[f"{one.what}: {one.reason}"] += 1
        if one.evidence:
            found.evidence.append(one.evidence)
        names = {name for strike in strikes if overlaps(strike, one) for name in tell(strike)}
        found.struck.update((name, one.what) for name in names)
    return found


def overlaps(strike: Strike, one: Judged) -> bool:
    return one.sent_s <= strike.until_s and one.end_s >= strike.at_s


def longest_gap(strike: Strike, all: Sequence[Judged]) -> float | None:
    """Of the streams that ran when it came: the longest time without a token that has to do with it. None: none ran."""
    gaps: list[float] = []
    for one in all:
        if one.sent_s <= strike.at_s <= one.last_s:
            gaps += [0.0, *(b - a for a, b in one.pauses if b >= strike.at_s and a <= strike.until_s)]
    return max(gaps, default=None)


def _difference(told: Told, what: str, right: Right) -> str:
    where = []
    for number, (got, wanted) in enumerate(zip(told.ids, right.ids, strict=False)):
        if got != wanted:
            at = next(
                (i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(map(len, (got, wanted)))
            )
            where.append(
                f"choice {number} from {at} of {len(wanted)} ({len(got)} came): "
                f"{got[at : at + 6]}, not {wanted[at : at + 6]}"
            )
    if not where:
        where.append(f"the text: {told.texts!r:.200}, not {right.texts!r:.200}")
    return f"{what}, {told.way}, question {told.question}, {told.tries} tries: {'; '.join(where)}"
