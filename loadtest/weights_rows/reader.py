"""A reader in a process of its own: rows that it keeps with the log, and a lookup at a param-server now and then.

    python -m loadtest.weights_rows.reader NATS_URL MODEL TABLE ROWS

It says `ready`, reads until its input ends, and prints what it saw as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field

import numpy as np

from loadtest.weights_rows.marks import ages_ms
from pdbus.client import connect
from pdbus.client.weights import RowBatch, RowTable
from pdbus.context import RequestContext
from pdbus.peers.rows import RowFollower
from pdbus.tasks import cancelled

_KEPT = 4096
"""Rows kept in memory."""
_ASKED = 64
_EVERY_S = 0.05


@dataclass(slots=True)
class Seen:
    """Of one reader, in milliseconds."""

    rows: int = 0
    """Rows that the log brought."""
    lags: list[float] = field(default_factory=list)
    """From the call that updated a row until it was here."""
    lookups: list[float] = field(default_factory=list)
    """How long lookups of rows took at a param-server, each as of what had been seen here."""
    kept: list[float] = field(default_factory=list)
    """The same from memory."""
    stale: int = 0
    """Rows that a lookup showed older than they were known to be: there may be none."""


async def read(url: str, model: str, name: str, rows: int) -> Seen:
    seen, last = Seen(), [RowBatch(np.zeros(0, np.int64), np.zeros((0, 2), np.float32), 0)]
    async with connect(url, model) as client:
        table = client.weights.table(name)
        async with table.watch() as batches, table.follower() as follower:
            await follower.lookup(np.arange(min(_KEPT, rows)), RequestContext.after(10))
            print("ready", flush=True)
            over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
            watching = asyncio.create_task(_watch(batches, seen, last))
            asking = asyncio.create_task(_ask(table, follower, rows, seen, last))
            await asyncio.wait((over, watching, asking), return_when=asyncio.FIRST_COMPLETED)
            await cancelled(watching, asking)
            await over
    return seen


async def _watch(batches: AsyncIterator[RowBatch], seen: Seen, last: list[RowBatch]) -> None:
    async for batch in batches:
        seen.lags += ages_ms(batch.values).tolist()
        seen.rows += len(batch.ids)
        last[0] = batch


async def _ask(table: RowTable, follower: RowFollower, rows: int, seen: Seen, last: list[RowBatch]) -> None:
    """Asks for rows that the log has just brought, and for some of those that are kept."""
    rng, loop = np.random.default_rng(0), asyncio.get_running_loop()
    while True:
        ids, values, seq = last[0].ids[:_ASKED], last[0].values[:_ASKED], last[0].seq
        begun = loop.time()
        found = await table.lookup(ids, at_least=seq)
        seen.lookups.append((loop.time() - begun) * 1e3)
        seen.stale += int((found.values[:, 1] < values[:, 1]).sum())
        begun = loop.time()
        await follower.lookup(rng.integers(0, min(_KEPT, rows), _ASKED), RequestContext.after(10))
        seen.kept.append((loop.time() - begun) * 1e3)
        await asyncio.sleep(_EVERY_S)


def main() -> None:
    url, model, name, rows = sys.argv[1:]
    print(json.dumps(asdict(asyncio.run(read(url, model, name, int(rows))))))


if __name__ == "__main__":
    main()
