"""One client updates single rows at a steady rate while another process follows them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass

import numpy as np

from loadtest.report import percentile
from loadtest.weights_rows.marks import mark
from pdbus.client import connect

WIDTH = 16
_TURN_S = 0.001
"""The client pauses so long between its bursts: an open loop at that grain."""


@dataclass(frozen=True, slots=True)
class RowsReport:
    """What was measured; lags and times in milliseconds."""

    rows: int
    """Of the table."""
    create_s: float
    wanted_per_s: float
    updates_per_s: float
    """Single-row updates, until the last was durable."""
    messages: int
    seen: int
    """Updates that the reader got: rows that came twice in one message count once."""
    lag_mean: float
    lag_p50: float
    lag_p99: float
    lookup_p50: float
    lookup_p99: float
    kept_p50: float
    """Of lookups from memory."""
    stale: int
    """Rows that a lookup showed older than they were known to be."""
    seal_s: float | None = None

    def lines(self) -> list[str]:
        return [
            f"table of {self.rows:,} rows of {WIDTH}, created in {self.create_s:.2f} s",
            f"{self.updates_per_s:,.0f} single-row updates/s (of {self.wanted_per_s:,.0f} wanted), "
            f"{self.messages} messages; {self.seen:,} seen",
            f"lag call -> another process: mean {self.lag_mean:.1f}, p50 {self.lag_p50:.1f}, p99 {self.lag_p99:.1f} ms",
            f"lookups of 64 rows at a param-server meanwhile: p50 {self.lookup_p50:.1f}, p99 {self.lookup_p99:.1f} ms; "
            f"from memory: p50 {self.kept_p50:.2f} ms",
            f"rows shown older than known: {self.stale}",
            *([] if self.seal_s is None else [f"sealed in {self.seal_s:.1f} s"]),
        ]


async def measure(
    url: str,
    model: str,
    *,
    table: str = "loadtest",
    rows: int = 10_000_000,
    per_s: float = 12_000,
    seconds: float = 10,
    seal: bool = False,
) -> RowsReport:
    """On a running stack's NATS server: makes the table where it isn't there, and updates it. Random rows.

    `seal`: seals it at the end, which rewrites nearly all of a table updated at random."""
    async with connect(url, model) as client:
        target = client.weights.table(table)
        begun = time.monotonic()
        if not await target.exists():
            await target.create(rows, WIDTH)
        create_s = time.monotonic() - begun
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "loadtest.weights_rows.reader", url, model, table, str(rows)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=64 << 20,
        )
        assert child.stdin
        assert child.stdout
        try:
            async with asyncio.timeout(30):
                await child.stdout.readline()
            rng, row = np.random.default_rng(1), np.zeros(WIDTH, np.float32)
            messages = target.messages
            begun, done = time.monotonic(), 0
            while (now := time.monotonic() - begun) < seconds:
                due = int(now * per_s) - done
                for row_id in rng.integers(0, rows, due).tolist():
                    mark(row)
                    row[1] = done
                    await target.update(row_id, row)
                    done += 1
                await asyncio.sleep(_TURN_S)
            await target.flush()
            took_s = time.monotonic() - begun
            await asyncio.sleep(0.5)  # the last entries are on their way
            child.stdin.close()
            async with asyncio.timeout(30):
                seen = json.loads(await child.stdout.read())
            await child.wait()
            seal_s = None
            if seal:
                begun = time.monotonic()
                await target.seal()
                seal_s = time.monotonic() - begun
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
    lags, lookups = sorted(seen["lags"]), sorted(seen["lookups"])
    return RowsReport(
        rows,
        create_s,
        per_s,
        done / took_s,
        target.messages - messages,
        seen["rows"],
        sum(lags) / len(lags),
        percentile(lags, 50),
        percentile(lags, 99),
        percentile(lookups, 50),
        percentile(lookups, 99),
        percentile(sorted(seen["kept"]), 50),
        seen["stale"],
        seal_s,
    )
