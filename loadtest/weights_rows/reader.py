"""A reader in a process of its own: rows that it keeps with the log, and a lookup at a param-server now and then.

    python -m loadtest.weights_rows.reader NATS_URL MODEL TABLE ROWS

It says `ready`, reads until its input ends, and prints what it saw as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass, field

import numpy as np

from loadtest.weights_rows.marks import ages_ms
from pdbus.client import connect
from pdbus.client.weights import RowTable
from pdbus.context import RequestContext

_KEPT = 4096
"""Rows looked up from memory at each entry of the log."""


@dataclass(slots=True)
class Seen:
    """Of one reader, in milliseconds."""

    rows: int = 0
    """Rows that the log brought."""
    lags: list[float] = field(default_factory=list)
    """From the call that updated a row until it was here."""
    lookups: list[float] = field(default_factory=list)
    """How long lookups of rows took at a param-server, each as of what had been seen here."""
    stale: int = 0
    """Rows that a lookup showed older than they were known to be: there may be none."""


async def read(url: str, model: str, name: str, rows: int) -> Seen:
    seen = Seen()
    async with connect(url, model) as client:
        table = client.weights.table(name)
        async with table.watch() as batches, table.follower() as follower:
            kept = np.arange(min(_KEPT, rows))
            await follower.lookup(kept, RequestContext.after(10))
            print("ready", flush=True)
            over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
            asking = asyncio.create_task(_ask(table, rows, seen))
            while True:
                coming = asyncio.ensure_future(anext(batches))
                await asyncio.wait((coming, over), return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    break
                batch = await coming
                seen.lags += ages_ms(batch.values).tolist()
                seen.rows += len(batch.ids)
                if follower.seq >= batch.seq:
                    found = await follower.lookup(batch.ids, RequestContext.after(10))
                    seen.stale += int((found.values[:, 1] < batch.values[:, 1]).sum())
            asking.cancel()
            await asyncio.gather(asking, coming, return_exceptions=True)
    return seen


async def _ask(table: RowTable, rows: int, seen: Seen) -> None:
    rng, loop = np.random.default_rng(0), asyncio.get_running_loop()
    while True:
        begun = loop.time()
        await table.lookup(rng.integers(0, rows, 64))
        seen.lookups.append((loop.time() - begun) * 1e3)
        await asyncio.sleep(0.05)


def main() -> None:
    url, model, name, rows = sys.argv[1:]
    print(json.dumps(asdict(asyncio.run(read(url, model, name, int(rows))))))


if __name__ == "__main__":
    main()
