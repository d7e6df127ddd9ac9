"""Goal 2, its last part: row updates of a sparse table."""

from __future__ import annotations

from loadtest.goals import Row, at_least, at_most, none_of
from loadtest.weights.terms import Terms
from loadtest.weights_rows.command import MODEL, serving
from loadtest.weights_rows.measure import measure as update_rows

_PER_S = 12_000
_LAG_MS = 23.0
_ROWS = 10_000_000
_OFFERED = 1.05
"""Of the goal: what is offered has to be above what is to be sustained."""


async def measure(terms: Terms) -> list[Row]:
    seconds = 5.0 if terms.short else 30.0
    async with serving() as url:
        found = await update_rows(url, MODEL, rows=_ROWS, per_s=_OFFERED * _PER_S, seconds=seconds)
    how = f"{_ROWS / 1e6:g} million rows, {seconds:g} s, single rows by one client"
    lag = f"{how}; call to another process, p50 {found.lag_p50:.1f} ms, p99 {found.lag_p99:.1f} ms"
    return [
        at_least(f"row updates, of {_PER_S:,} a second", found.updates_per_s / _PER_S, 1.0, how),
        at_most("row updates: mean lag", found.lag_mean, _LAG_MS, "ms", lag),
        none_of("rows that a lookup showed older than known", found.stale, found.seen, how),
    ]
