"""Goal 6, as far as one stack shows it: blocks and cache entries read under load, and what workers need not read."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from loadtest.goals import Row, at_least, at_most
from loadtest.metrics import Counters, counters
from loadtest.prompts import Prompts
from loadtest.report import percentile
from loadtest.weights.changes import Changes
from loadtest.weights.commits import beside, settled
from loadtest.weights.load import Loader
from loadtest.weights.serve import OFTEN_S
from loadtest.weights.terms import Subject, Terms, subject
from pdbus.bus.bus import Bus, connect
from pdbus.bus.presence import Fleet
from pdbus.canonical import content_digest
from pdbus.context import Deadline, RequestContext
from pdbus.messages.common import Digest
from pdbus.messages.presence import Card
from pdbus.peers.cache import CacheRing
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.subjects import ANY, PRESENCE

_STREAMS = 4
_ENTRIES, _ENTRY_BYTES = 64, 16 << 10
_LOG_S = 30.0
_GAP_S = 0.01


async def measure(terms: Terms) -> list[Row]:
    seconds = 5.0 if terms.short else 30.0
    changes, loader = Changes(terms.model), Loader(Prompts.of(terms.model))
    async with counters() as known, subject(terms, env=known.env) as on:
        await loader.closed(on, _STREAMS, 2.0)
        async with connect(on.stack.nats_url, name="loadtest servers") as bus:
            blocks = await _under_load(on, loader, seconds, _blocks(bus, on))
            entries = await _under_load(on, loader, seconds, _entries(bus))
            saved = await _model_cache(on, loader, changes, known, bus, seconds)
    how = f"beside {_STREAMS} streams, one after another, {seconds:g} s"
    return [_row("block fetch", blocks, 50, how), _row("cache read", entries, 5, how), *saved]


def _row(what: str, took_ms: list[float], goal_ms: float, how: str) -> Row:
    told = f"{len(took_ms)} {how}, p50 {percentile(took_ms, 50):.2f} ms"
    return at_most(f"{what} under load, p99", percentile(took_ms, 99), goal_ms, "ms", told)


async def _under_load(
    on: Subject, loader: Loader, seconds: float, reads: Callable[[float], Awaitable[list[float]]]
) -> list[float]:
    load = asyncio.create_task(loader.closed(on, _STREAMS, seconds))
    try:
        return await reads(seconds)
    finally:
        await load


def _blocks(bus: Bus, on: Subject) -> Callable[[float], Awaitable[list[float]]]:
    """Any block of the served version, each time another one, from the servers, checked."""

    async def reads(seconds: float) -> list[float]:
        async with HistoryFollower(bus, on.model) as follower:
            await follower.caught_up(Deadline.after(_LOG_S))
            reader, root = BlockReader(bus, on.model, follower), follower.history.resolve("stable")
            manifest = await reader.manifest(root, RequestContext.after(_LOG_S))
            named = [(tensor, index) for tensor in manifest.tensors.values() for index in range(len(tensor.blocks))]
            rng = random.Random(0)

            async def read() -> None:
                tensor, index = rng.choice(named)
                await reader.blocks(tensor, [index], RequestContext.after(_LOG_S))

            return await _timed(read, seconds)

    return reads


def _entries(bus: Bus) -> Callable[[float], Awaitable[list[float]]]:
    """Entries of the size of an answer's, or of a few KV pages', that are there."""

    async def reads(seconds: float) -> list[float]:
        async with Fleet(bus) as fleet, CacheRing(bus, fleet, replicas=1) as ring:
            await fleet.wait_for(lambda known: bool(known.live("cache")), Deadline.after(_LOG_S))
            ctx, value = RequestContext.after(_LOG_S * 10), random.Random(0).randbytes(_ENTRY_BYTES)
            keys = [content_digest(f"weights {number}".encode()) for number in range(_ENTRIES)]
            for key in keys:
                await ring.write("result", key, keys[0], b"", value, ctx, ttl_s=600.0)
            rng = random.Random(0)

            async def read() -> None:
                (found,) = await ring.get("result", [rng.choice(keys)], keys[0], [b""], ctx)
                if found != value:
                    raise AssertionError("a cache node lost an entry, or did not answer within its time")

            return await _timed(read, seconds)

    return reads


async def _timed(read: Callable[[], Awaitable[None]], seconds: float) -> list[float]:
    """Milliseconds of each."""
    found = []
    until = time.perf_counter() + seconds
    while (start := time.perf_counter()) < until:
        await read()
        found.append((time.perf_counter() - start) * 1e3)
        await asyncio.sleep(_GAP_S)
    return found


async def _model_cache(
    on: Subject, loader: Loader, changes: Changes, known: Counters, bus: Bus, seconds: float
) -> list[Row]:
    """Of all weights that the workers' new versions consist of, the part that they had already."""
    loaded: set[tuple[str, Digest]] = set()

    def hear(card: Card) -> None:
        if card.service in ("prefill", "decode"):
            loaded.update((card.id, root) for root in card.roots)

    async with await bus.subscribe(PRESENCE(service=ANY, id=ANY), hear):
        await known.settle()  # each worker's card comes meanwhile
        before, had = known.total("pdbus.blocks.fetched"), len(loaded)
        load = asyncio.create_task(loader.closed(on, _STREAMS, 2 * seconds))
        async with beside(on.client.weights, changes.two_layers, OFTEN_S):
            await load
        await settled(on.client.weights)
        await known.settle()
    fetched = known.total("pdbus.blocks.fetched") - before
    versions = len(loaded) - had
    needed = versions * changes.nbytes
    how = (
        f"{versions} versions of 2 new layers each, over all workers, {needed / 1e6:.0f} MB: {fetched / 1e6:.0f} MB of "
        "that came from the servers"
    )
    share = 1 - fetched / needed if needed else float("nan")
    return [at_least("model cache: weights that workers had already", share, 0.92, how)]
