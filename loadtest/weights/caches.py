"""Goal 6, result and feature cache: hit rates of a recommender-like trace, through a real router and cache node.

Workers are simulated: what is counted is who was asked, not what they compute. The feature service is a caller's own
NATS subject.
"""

from __future__ import annotations

import asyncio
import time

import aiohttp

from loadtest.client import ask
from loadtest.goals import Row, at_least, none_of
from loadtest.metrics import Counters, counters
from loadtest.prompts import completion
from loadtest.router.rig import MODEL, Rig, rig
from loadtest.weights.terms import Terms
from loadtest.weights.zipf import Zipf
from pdbus.bus.bus import connect
from pdbus.client.client import Client
from pdbus.context import RequestContext
from pdbus.messages.features import SourceReply, SourceRequest
from pdbus.subjects import FEATURE_SOURCE, To
from pdbus.weights.blocks import Array

_SUBJECT = "loadtest.features"
_AT_ONCE = 16
_ANSWER_S = 30.0
_NEW_TOKENS = 8
_RESULTS, _FEATURES = "pdbus.router.result_cache", "pdbus.router.features"
_VECTOR = bytes(256)
"""64 numbers of fp32."""


async def measure(terms: Terms) -> list[Row]:
    trace = Zipf()
    first, counted = (1500, 1500) if terms.short else (4000, 8000)
    users, items = trace.draw(first + counted)
    async with counters() as known, rig(1, cache_nodes=1, env=_env(known)) as running:
        failed = await _ask(running, users[:first], items[:first])
        before = await _counts(known)
        failed += await _ask(running, users[first:], items[first:])
        after = await _counts(known)
        writes = known.by("pdbus.cache.writes")
    told = f"{counted} requests after {first} that filled it; {trace.told}"
    (results, asked), (features, looked) = (
        (after[name][0] - before[name][0], after[name][1] - before[name][1]) for name in (_RESULTS, _FEATURES)
    )
    return [
        at_least("result cache, hit rate", results / max(asked, 1), 0.85, f"{told}; one question of each user"),
        at_least("feature cache, hit rate", features / max(looked, 1), 0.70, f"{told}; {looked:.0f} lookups, of both"),
        none_of(
            "failed requests of that trace",
            len(failed),
            2 * (first + counted),
            f"answers and lookups: {failed[:1] or 'none'}",
            writes=writes,
        ),
    ]


def _env(known: Counters) -> dict[str, str]:
    return {"PDBUS_FEATURE_SUBJECT": _SUBJECT, **known.env}


async def _counts(known: Counters) -> dict[str, tuple[float, float]]:
    """(hits, all) of each cache so far."""
    await known.settle()
    return {name: (known.total(name, outcome="hit"), known.total(name)) for name in (_RESULTS, _FEATURES)}


async def _ask(running: Rig, users: Array, items: Array) -> list[str]:
    """Each request: the features of its user and its items, and the user's answer. Returns why some failed."""
    turns = iter(range(len(users)))
    failed: list[str] = []

    async def source(message: SourceRequest, ctx: RequestContext) -> SourceReply:
        return SourceReply("1", (_VECTOR,) * len(message.keys))

    async with connect(running.nats_url, name="loadtest trace") as bus, aiohttp.ClientSession() as http:
        client = Client(bus, MODEL)

        async def stream() -> None:
            for turn in turns:
                keys = [f"user {users[turn]}", *(f"item {item}" for item in items[turn])]
                reply = await client.features(keys)
                failed.extend(["a feature is not its source's"] * any(value != _VECTOR for value in reply.values))
                body = completion(MODEL, [int(digit) + 48 for digit in str(users[turn])], _NEW_TOKENS)
                seen = await ask(http, running.urls[0], body, 0.0, time.perf_counter(), _ANSWER_S)
                failed.extend([seen.error] if seen.error else [])

        async with await bus.serve(To(FEATURE_SOURCE, _SUBJECT), source, limit=256):
            await asyncio.gather(*(stream() for _ in range(_AT_ONCE)))
    return failed
