"""From what streams and prompts saw to ITL, TTFT and goodput. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.client import Observation
from loadtest.report import percentile


@dataclass(frozen=True, slots=True)
class Slo:
    """What an answer must keep to count as good."""

    itl_p99_ms: float
    ttft_ms: float

    def met_by_stream(self, answer: Observation) -> bool:
        return answer.ok and percentile(answer.gaps_s, 99) * 1e3 <= self.itl_p99_ms

    def met_by_prompt(self, answer: Observation) -> bool:
        return answer.ok and answer.ttft_s is not None and answer.ttft_s * 1e3 <= self.ttft_ms


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run."""

    itl_p50_ms: float
    itl_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    """Of the long prompts."""
    goodput_tokens_per_s: float
    """Tokens of answers that met the SLO."""
    tokens_per_s: float
    failed: int


def figures(streams: Sequence[Observation], prompts: Sequence[Observation], seconds: float, slo: Slo) -> Figures:
    gaps = [gap for answer in streams for gap in answer.gaps_s]
    firsts = [answer.ttft_s for answer in prompts if answer.ttft_s is not None]
    good = [answer for answer in streams if slo.met_by_stream(answer)]
    good += [answer for answer in prompts if slo.met_by_prompt(answer)]
    everything = (*streams, *prompts)
    return Figures(
        percentile(gaps, 50) * 1e3,
        percentile(gaps, 99) * 1e3,
        percentile(firsts, 50) * 1e3,
        percentile(firsts, 99) * 1e3,
        sum(answer.output_tokens for answer in good) / seconds,
        sum(answer.output_tokens for answer in everything if answer.ok) / seconds,
        sum(not answer.ok for answer in everything),
    )


def pooled(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure; failures add up."""
    names = [name for name in Figures.__dataclass_fields__ if name != "failed"]
    medians = {name: median(getattr(one, name) for one in rounds) for name in names}
    return Figures(**medians, failed=sum(one.failed for one in rounds))
