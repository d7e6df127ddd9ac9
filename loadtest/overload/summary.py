"""From what was seen to the lines of the report. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from loadtest.client import Observation
from loadtest.goals import Row, at_least, at_most, beside
from loadtest.overload.asking import REFUSED
from loadtest.report import percentile

RAMP = 0.2
"""Of a run, until it is what it will be."""
MOST_ITL = 1.25
RECOVERED_S = 2.0
MOST_GROWTH = 0.1
_SMALL_BYTES = 32 << 20
"""Growth below it is no sign of anything."""


def goodput(seen: Sequence[Observation], duration_s: float, deadline_s: float) -> float:
    """Tokens a second of answers that were whole within their deadline, from the ramp's end to the last arrival."""
    begin_s, tokens = RAMP * duration_s, 0.0
    for one in seen:
        if one.ok and one.chunks_s and one.end_s - one.due_s <= deadline_s:
            within = sum(begin_s <= moment <= duration_s for moment in one.chunks_s)
            tokens += one.output_tokens * within / len(one.chunks_s)
    return tokens / (duration_s - begin_s)


def ttfts(seen: Sequence[Observation]) -> list[float]:
    return [one.ttft_s for one in seen if one.ok and one.ttft_s is not None]


def overload_rows(
    best: float, seen: Sequence[Observation], duration_s: float, deadline_s: float, load: float
) -> list[Row]:
    admitted = [one for one in seen if one.status not in REFUSED and one.status]
    got = goodput(seen, duration_s, deadline_s)
    took = [one.end_s - one.due_s if one.ok else math.inf for one in admitted]
    states = {str(status): count for status, count in sorted(Counter(one.status for one in seen).items())}
    refusals_ms = [(one.end_s - one.sent_s) * 1e3 for one in seen if one.status in REFUSED]
    failed = Counter(one.error for one in admitted if not one.ok)
    late = sum(one_s > deadline_s for one_s in took)
    return [
        at_least(
            "goodput of the best", got / best, 0.9, f"{got:.0f} of {best:.0f} tok/s, arrivals at {load:g} x", best=best
        ),
        at_most(
            "p99 of admitted requests",
            percentile(took, 99),
            deadline_s,
            "s",
            f"{len(admitted)} of {len(seen)} admitted, {late} of them late or failed; statuses {states}",
            late=late,
            failed=dict(failed),
        ),
        beside("refused in, p50", f"{percentile(refusals_ms, 50):.1f} ms", "as its client sees it, this machine busy"),
    ]


def memory_row(samples: Sequence[Mapping[str, int]]) -> Row:
    """Flat: from the ramp's end on no process grows by more than a tenth, or a little."""
    early, last = samples[int(RAMP * len(samples))], samples[-1]
    grown = {name: last[name] - early[name] for name in early if last.get(name) and early[name]}
    worst = max(grown, key=lambda name: grown[name] / early[name], default="")
    share = 0.0 if not worst or grown[worst] < _SMALL_BYTES else grown[worst] / early[worst]
    how = f"most: {worst} by {grown.get(worst, 0) / 2**20:+.0f} MiB of {early.get(worst, 0) / 2**20:.0f}"
    return at_most("growth of a process's memory", 100 * share, 100 * MOST_GROWTH, "%", how, grown=grown)


def recovery_row(probes: Sequence[Observation], normal_s: float) -> Row:
    """When from then on every probe is answered as soon as in the best run."""
    bad = [one.due_s for one in probes if not one.ok or (one.ttft_s or math.inf) > normal_s]
    after_s = 0.0 if not bad else next((one.due_s for one in probes if one.due_s > max(bad)), math.inf)
    states = dict(Counter(one.error or "ok" for one in probes))
    how = f"first token within {normal_s * 1e3:.0f} ms, the best run's p99; probes {states}"
    return at_most("normal service after its end", after_s, RECOVERED_S, "s", how)


def flood_rows(alone: Sequence[Observation], flooded: Sequence[Observation], chunk_s: float) -> list[Row]:
    """The quiet tenant's figures without and with another's flood."""
    itl, with_itl = ([gap for one in seen for gap in one.gaps_s] for seen in (alone, flooded))
    first, with_first = ttfts(alone), ttfts(flooded)
    ratio = percentile(with_itl, 99) / percentile(itl, 99)
    rows = [
        at_most(
            "ITL p99, flooded / alone",
            ratio,
            MOST_ITL,
            "x",
            f"{percentile(itl, 99) * 1e3:.0f} -> {percentile(with_itl, 99) * 1e3:.0f} ms;"
            f" p50 {percentile(itl, 50) * 1e3:.0f} -> {percentile(with_itl, 50) * 1e3:.0f}",
        )
    ]
    for percent in (50, 90):
        before, after = percentile(first, percent), percentile(with_first, percent)
        how = f"{before * 1e3:.0f} -> {after * 1e3:.0f} ms"
        rows.append(at_most(f"TTFT p{percent}, later by", 1e3 * (after - before), 1e3 * chunk_s, "ms (one chunk)", how))
    last = 1e3 * (percentile(with_first, 99) - percentile(first, 99))
    rows.append(beside("TTFT p99, later by", f"{last:.0f} ms", f"the slowest of {len(with_first)}"))
    failed = Counter(one.error for one in flooded if not one.ok)
    rows.append(beside("its answers", f"{len(alone)}, {len(flooded)}", f"failed while flooded: {dict(failed)}"))
    return rows
