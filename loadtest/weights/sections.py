"""The sections of the report. One more is a line here: a name, what it shows, an async function that gives its rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from loadtest.weights import caches, fresh, join, prefix, serve, servers
from loadtest.weights.table import Row
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
    "caches": Section("result and feature cache on a recommender's trace", caches.measure),
}
