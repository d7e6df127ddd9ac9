"""What the clients were told, held against what they should have been told. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from loadtest.chaos.asking import Told
from loadtest.chaos.questions import Ids
from loadtest.chaos.strikes import Strike

RIGHT, REFUSED, FAILED, WRONG, DOUBLED, MISSING = "right", "refused", "failed", "wrong", "doubled", "missing"
OUTCOMES = (RIGHT, REFUSED, FAILED, WRONG, DOUBLED, MISSING)


def outcome(told: Told, expected: Ids) -> str:
    """What was told before a refusal has to be right, too."""
    if told.refused or told.failed:
        begun = all(tuple(part) == right[: len(part)] for part, right in zip(told.parts, expected, strict=False))
        return WRONG if not begun else REFUSED if told.refused else FAILED
    if told.ids == expected:
        return RIGHT
    lengths = [(len(part), len(right)) for part, right in zip(told.ids, expected, strict=False)]
    if len(told.ids) != len(expected) or any(got < wanted for got, wanted in lengths):
        return MISSING
    return DOUBLED if any(got > wanted for got, wanted in lengths) else WRONG


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


def judge(
    all: Sequence[Told], expected: Mapping[int, Ids], strikes: Sequence[Strike], tell: Callable[[Strike], Sequence[str]]
) -> Judgement:
    """`tell`: under which names a strike is counted."""
    found = Judgement()
    for told in all:
        right = expected[told.question]
        what = outcome(told, right)
        found.counts[what] += 1
        if reason := told.failed or told.refused:
            found.reasons[f"{what}: {reason[:160]}"] += 1
        if what in (WRONG, DOUBLED, MISSING):
            found.evidence.append(_difference(told, what, right))
        names = {name for strike in strikes if overlaps(strike, told) for name in tell(strike)}
        found.struck.update((name, what) for name in names)
    return found


def overlaps(strike: Strike, told: Told) -> bool:
    return told.sent_s <= strike.until_s and told.end_s >= strike.at_s


def longest_gap(strike: Strike, all: Sequence[Told]) -> float | None:
    """Of the streams that ran when it came: the longest time without a token that has to do with it. None: none ran."""
    gaps = []
    for told in all:
        if told.tokens_s and told.sent_s <= strike.at_s <= told.tokens_s[-1]:
            moments = [told.sent_s, *told.tokens_s]
            gaps += [b - a for a, b in itertools.pairwise(moments) if b >= strike.at_s and a <= strike.until_s]
    return max(gaps, default=None)


def _difference(told: Told, what: str, right: Ids) -> str:
    where = []
    for number, (got, wanted) in enumerate(zip(told.ids, right, strict=False)):
        if got != wanted:
            at = next(
                (i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(map(len, (got, wanted)))
            )
            where.append(
                f"choice {number} from {at} of {len(wanted)} ({len(got)} came): "
                f"{got[at : at + 6]}, not {wanted[at : at + 6]}"
            )
    return f"{what}, {told.way}, question {told.question}, {told.tries} tries: {'; '.join(where)}"
