"""Goal 2: how soon a commit is served, how soon the log is known, and how many bytes of weights travel for it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

from loadtest.client import ask
from loadtest.goals import Row, at_least, at_most
from loadtest.metrics import Counters, counters
from loadtest.prompts import Prompts
from loadtest.report import percentile
from loadtest.weights.changes import Change, Changes
from loadtest.weights.commits import STABLE, Told, commit, settled
from loadtest.weights.known import lags_ms
from loadtest.weights.load import Loader
from loadtest.weights.oracle import PREFIX
from loadtest.weights.terms import Subject, Terms, subject
from pdbus.messages.common import Digest

_SHARE = 0.05
_ANSWER_S = 60.0
_LOADED_STREAMS = 4
_ENTRIES_EVERY_S = 0.05
_SETTLE_S = 1.0


async def measure(terms: Terms) -> list[Row]:
    changes, loader = Changes(terms.model), Loader(Prompts.of(terms.model))
    counts = (5, 3, 2) if terms.short else (40, 20, 8)
    kinds: tuple[tuple[str, Callable[[], Change], float], ...] = (
        ("1 block", changes.one_block, 1.0),
        ("5 % of the blocks", lambda: changes.scattered(_SHARE), 2.0),
        ("all blocks", changes.everything, 10.0),
    )
    rows: list[Row] = []
    async with counters() as known, subject(terms, env=known.env) as on:
        await loader.closed(on, _LOADED_STREAMS, 2.0)
        rows += await _known(terms, on, loader)
        for (name, make, goal_s), count in zip(kinds, counts, strict=True):
            before = await _moved(known)
            waits, told = await _served(on, loader, make, count)
            moved = await _moved(known) - before
            rows.append(_row(name, goal_s, waits, told))
            if make is kinds[1][1]:
                rows += _saved(on, changes.nbytes, moved / count, told.sent_bytes / count)
            print(f"{rows[-1]}", file=sys.stderr, flush=True)
    return rows


def _row(name: str, goal_s: float, waits: list[float], told: Told) -> Row:
    staged = percentile(told.staged_s, 50)
    how = (
        f"p99 (the largest) of {len(waits)} commits, one after another, p50 {percentile(waits, 50):.2f} s; from the "
        f"log's stamp to the first token; the update before that took {staged:.2f} s (p50)"
    )
    p99 = percentile(waits, 99)
    return at_most(f"commit of {name} to first token", p99, goal_s, "s", how, waits_s=waits, staged_s=told.staged_s)


def _saved(on: Subject, model_bytes: int, moved: float, sent: float) -> list[Row]:
    """What travels for one commit, against each worker's loading, and the trainer's sending, of all."""
    workers = len(on.stack.pids("prefill")) + len(on.stack.pids("decode"))
    return [
        at_least(
            "bytes saved by a 5 % commit, servers to workers",
            1 - moved / (workers * model_bytes),
            0.90,
            f"{moved / 1e6:.1f} MB to all services, counted by them, against {workers} x {model_bytes / 1e6:.0f} MB",
        ),
        at_least(
            "bytes saved by a 5 % commit, trainer to servers",
            1 - sent / model_bytes,
            0.90,
            f"{sent / 1e6:.1f} MB as they travelled, to all owners",
        ),
    ]


async def _moved(known: Counters) -> float:
    await asyncio.sleep(_SETTLE_S)
    await known.settle()
    return known.total("pdbus.blocks.fetched")


async def _served(on: Subject, loader: Loader, make: Callable[[], Change], count: int) -> tuple[list[float], Told]:
    """Seconds from each commit to the first token of the first request that is admitted on it."""
    told, waits = Told(), []
    for _ in range(count):
        root = await commit(on.client.weights, make(), told)
        waits.append((await _first_token_ns(on, loader, root) - told.committed[-1][1]) / 1e9)
        await settled(on.client.weights)
    return waits, told


async def _first_token_ns(on: Subject, loader: Loader, root: Digest) -> int:
    """Wall clock. Asks by the ref as soon as that moves, and again while a router still has the older version."""
    await on.client.weights.wait_for_ref(STABLE, root, _ANSWER_S)
    async with asyncio.timeout(_ANSWER_S):
        while True:
            start, start_ns = time.perf_counter(), time.time_ns()
            body = loader.body(on.model, loader.prompt(), 1)
            seen = await ask(on.http, on.url, body, 0.0, start, _ANSWER_S)
            if seen.fingerprint == PREFIX + root.hex() and seen.chunks_s:
                return start_ns + int(seen.chunks_s[0] * 1e9)


async def _known(terms: Terms, on: Subject, loader: Loader) -> list[Row]:
    """Idle, and beside a load."""
    count = 20 if terms.short else 200
    idle = await lags_ms(on.stack.nats_url, on.model, count, _ENTRIES_EVERY_S)
    busy = asyncio.create_task(lags_ms(on.stack.nats_url, on.model, count, _ENTRIES_EVERY_S))
    while not busy.done():
        await loader.closed(on, _LOADED_STREAMS, 1.0)
    loaded = await busy
    how = f"{count} entries, from the log's stamp to the last worker's card here"
    busy_how = f"{how}, beside {_LOADED_STREAMS} streams"
    return [
        at_most("log entry known to every worker, mean", sum(idle) / count, 23, "ms", f"{how}, idle", lags_ms=idle),
        at_most("log entry known to every worker, p99", percentile(idle, 99), 50, "ms", f"{how}, idle"),
        at_most("the same under load, p99", percentile(loaded, 99), 150, "ms", busy_how, lags_ms=loaded),
    ]
