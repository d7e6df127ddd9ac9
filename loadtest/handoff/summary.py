"""From answers to what the hand-over costs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.client import Observation
from loadtest.peers.base import Shape
from loadtest.report import percentile


@dataclass(frozen=True, slots=True)
class Moments:
    """Of one answer, in ms."""

    first: float
    """From the request to the first token: the prefill worker sends it."""
    step: float
    """Between two later tokens, in the middle."""
    gap: float
    """Between the first and the second token: the rest of the hand-over, and the first step at the decode worker."""

    @property
    def second(self) -> float:
        """From the request to the second token: none comes before all of the hand-over."""
        return self.first + self.gap

    @property
    def handover(self) -> float:
        """What came between the first two tokens besides a step."""
        return self.gap - self.step


def moments(answer: Observation) -> Moments:
    """Raises ValueError where the answer has too few tokens to tell."""
    gaps = answer.gaps_s
    if answer.ttft_s is None or len(gaps) < 3:
        raise ValueError(f"an answer of {len(answer.chunks_s)} pieces tells nothing of the hand-over")
    return Moments(answer.ttft_s * 1e3, median(gaps[1:]) * 1e3, gaps[0] * 1e3)


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over answers, in ms, and shares."""

    first_ms: float
    step_ms: float
    handover_ms: float
    handover_share: float
    """Of the time to the first token."""


def cost(answers: Sequence[Moments]) -> Cost:
    first = median(one.first for one in answers)
    handover = median(one.handover for one in answers)
    return Cost(first, median(one.step for one in answers), handover, handover / first)


def against(apart: Sequence[Moments], together: Sequence[Moments], moment: Callable[[Moments], float]) -> float | None:
    """By which part a moment comes later where prefill and decode are apart: the median over the prompts, which are the
    same ones in the same order. None where there are none of either."""
    if not apart or len(apart) != len(together):
        return None
    return median(moment(one) / moment(other) for one, other in zip(apart, together, strict=True)) - 1


def wire_ratio(wire_bytes: int, tokens: int, shape: Shape) -> float:
    """Bytes on the wire against the same KV in fp16."""
    return wire_bytes / (tokens * shape.kv_values * 2)


def ways_ms(left: Sequence[Sequence[float]], arrived: Sequence[Sequence[float]]) -> list[float]:
    """From each token's leave of a worker to its arrival at the client, by answers in the same order.

    Answers in which pieces and tokens differ in number are left out: then it isn't known which came with which."""
    return [
        (there - here) * 1e3
        for tokens, pieces in zip(left, arrived, strict=False)
        if len(tokens) == len(pieces)
        for here, there in zip(tokens, pieces, strict=True)
    ]


def way(values_ms: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}_ms": percentile(values_ms, percent) for percent in (50, 90, 99)}
