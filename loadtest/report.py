"""From observations to figures, and from figures to a table. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.client import Observation

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True)
class Report:
    """Figures of one server under one scenario. Latencies in ms, rates per second of the run's wall time."""

    target: str
    scenario: str
    sent: int
    completed: int
    errors: dict[str, int]
    wall_s: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    total_ms: dict[str, float]
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    late_ms: dict[str, float]
    """How late the generator itself sent: large values mean that the load was not the one asked for."""

    def as_json(self) -> dict[str, Any]:
        return {key: _finite(value) for key, value in vars(self).items()}


def summarize(target: str, scenario: str, observations: Sequence[Observation]) -> Report:
    done = [seen for seen in observations if seen.ok]
    wall_s = max((seen.end_s for seen in observations), default=0.0)
    output = sum(seen.output_tokens for seen in done)
    return Report(
        target=target,
        scenario=scenario,
        sent=len(observations),
        completed=len(done),
        errors=dict(Counter(seen.error for seen in observations if seen.error).most_common(10)),
        wall_s=wall_s,
        ttft_ms=_percentiles([seen.ttft_s for seen in done if seen.ttft_s is not None]),
        itl_ms=_percentiles([gap for seen in done for gap in seen.gaps_s]),
        total_ms=_percentiles([seen.end_s - seen.due_s for seen in done]),
        requests_per_s=len(done) / wall_s if wall_s else 0.0,
        output_tokens_per_s=output / wall_s if wall_s else 0.0,
        prompt_tokens=sum(seen.prompt_tokens for seen in done),
        cached_tokens=sum(seen.cached_tokens for seen in done),
        output_tokens=output,
        late_ms=_percentiles([seen.sent_s - seen.due_s for seen in observations]),
    )


def table(reports: Sequence[Report]) -> str:
    """One row a report, columns aligned, and below it each kind of error with its count."""
    head = ["target", "scenario", "sent", "ok", "req/s", "out tok/s", "cached"]
    head += [f"{name} p{p}" for name in ("TTFT", "ITL", "total") for p in PERCENTILES]
    rows = [head] + [_row(report) for report in reports]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [
        f"{report.target} {report.scenario}: {count} × {error}"
        for report in reports
        for error, count in report.errors.items()
    ]
    return "\n".join(lines)


def _row(report: Report) -> list[str]:
    cached = report.cached_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    row = [report.target, report.scenario, str(report.sent), str(report.completed)]
    row += [f"{report.requests_per_s:.2f}", f"{report.output_tokens_per_s:.1f}", f"{cached:.0%}"]
    for figures in (report.ttft_ms, report.itl_ms, report.total_ms):
        row += ["-" if math.isnan(value) else f"{value:.0f}" for value in figures.values()]
    return row


def _percentiles(values_s: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": percentile(values_s, percent) * 1e3 for percent in PERCENTILES}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
