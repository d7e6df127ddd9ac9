"""What differs, counted and told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.invariance.engine import Answer
from loadtest.markdown import markdown


@dataclass(frozen=True)
class Comparison:
    """One way of computing against the first one."""

    way: str
    rows: int
    """Of logits that were compared."""
    differing: int
    """Rows with another bit anywhere."""
    differing_answers: int
    """Answers with another token."""
    cached_tokens: int
    took_place: bool
    """What the way is for happened: a prefix was found, something was preempted."""

    @property
    def equal(self) -> bool:
        return self.took_place and self.rows > 0 and not self.differing and not self.differing_answers


def compare(way: str, answers: Sequence[Answer], reference: Sequence[Answer], took_place: bool) -> Comparison:
    pairs = list(zip(answers, reference, strict=True))
    differing = sum(
        sum(a != b for a, b in zip(one.logits, other.logits, strict=False)) + abs(len(one.logits) - len(other.logits))
        for one, other in pairs
    )
    return Comparison(
        way,
        rows=sum(len(other.logits) for _, other in pairs),
        differing=differing,
        differing_answers=sum(one.ids != other.ids for one, other in pairs),
        cached_tokens=sum(one.cached_tokens for one in answers),
        took_place=took_place,
    )


def render(comparisons: Sequence[Comparison]) -> str:
    head = ["computed", "rows of logits", "cached tokens", "rows that differ", "answers that differ"]
    return markdown(head, [_cells(one) for one in comparisons])


def _cells(one: Comparison) -> list[str]:
    cells = [one.way, one.rows, one.cached_tokens, one.differing, one.differing_answers]
    return [*map(str, cells)] if one.took_place else [f"{one.way}: DID NOT HAPPEN", *map(str, cells[1:])]
