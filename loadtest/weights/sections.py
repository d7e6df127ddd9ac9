"""The sections of the report. One more is a line here: a name, what it shows, an async function that gives its rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.goals import Row
from loadtest.weights import caches, fresh, hot, join, layers, prefix, rows, serve, servers, streamed, writing
from loadtest.weights.terms import Terms


@dataclass(frozen=True, slots=True)
class Section:
    about: str
    measure: Callable[[Terms], Awaitable[Sequence[Row]]]


SECTIONS: Mapping[str, Section] = {
    "serve": Section("failed requests, throughput and equal answers beside commits", serve.measure),
    "fresh": Section("from a commit to its first token, from the log to the workers, and bytes moved", fresh.measure),
    "prefix": Section("cached tokens and text before an update, after it and after a rollback", prefix.measure),
    "join": Section("a new worker joins and serves", join.measure),
    "servers": Section("block fetches and cache reads under load, and what the model cache saves", servers.measure),
    "rows": Section("row updates of a sparse table, and how soon another process sees them", rows.measure),
    "streamed": Section("layers read from disk because memory for weights is short", streamed.measure),
    "layers": Section("layers that versions have in common", layers.measure),
    "hot": Section("a hot matrix over several servers, a hot model of its own, int8 made once", hot.measure),
    "writing": Section("updates of several processes, and a staging branch", writing.measure),
    "caches": Section("result and feature cache on a recommender's trace", caches.measure),
}
