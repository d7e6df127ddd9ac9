"""What was deleted and is still there is found; nothing else is."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.caching.entry import Entry
from pdbus.context import Deadline
from pdbus.invalidator.audit import GRACE_S, Audit, opinion_of, opinion_of_version
from pdbus.invalidator.caches import CACHES
from pdbus.invalidator.deletions import NS, Deletions
from pdbus.messages.cache import Kind, ScannedEntry
from pdbus.messages.changelog import Commit, Forget, LogEntry, Ref
from pdbus.messages.presence import Card
from pdbus.messages.workers import Invalidated
from pdbus.weights.history import History
from tests.support.cache_nodes import cache_node

DEAD, LIVE, STRANGE = b"\x01" * 32, b"\x02" * 32, b"\x03" * 32
NOW_NS = 1_000_000 * NS


class Follower:
    """Stands for both followers."""

    def __init__(self) -> None:
        self.history, self.deletions = History(), Deletions("m")
        for seq, root in enumerate((DEAD, LIVE), 1):
            self.history.apply(seq, NOW_NS, LogEntry(commit=Commit(f"tx{seq}", root, None, "a", "", ())))
        self.history.apply(3, NOW_NS, LogEntry(ref=Ref("stable", LIVE, "a")))

    async def caught_up(self, deadline: Deadline) -> None:
        """It always is."""

    def delete(self, root: bytes = DEAD) -> None:
        self.deletions.apply(1, NOW_NS, Invalidated("m", "delete", root=root, cause=3))


def entry(root: bytes, kind: Kind = "result", name: str = "") -> ScannedEntry:
    return ScannedEntry(kind, root, root, "t", 1, name)


def test_every_kind_of_entry_is_registered() -> None:
    assert set(typing.get_args(Kind)) == CACHES.keys(), "the invalidator has to know how a new cache forgets"


@pytest.mark.parametrize("kind", ["result", "feature", "kv"])
def test_an_entry_of_a_deleted_version_is_a_violation_once_nodes_must_know(kind: Kind) -> None:
    logs = Follower()
    after_ns = NOW_NS + int((GRACE_S + 1) * NS)
    assert opinion_of(entry(DEAD, kind), logs.deletions, logs.history, after_ns) == "sound", "it is not deleted yet"
    logs.delete()
    assert opinion_of(entry(DEAD, kind), logs.deletions, logs.history, NOW_NS + NS) == "sound", "it may be on its way"
    assert opinion_of(entry(DEAD, kind), logs.deletions, logs.history, after_ns) == "violation"
    assert opinion_of(entry(LIVE, kind), logs.deletions, logs.history, after_ns) == "sound"
    logs.deletions.apply(2, NOW_NS, Invalidated("m", "restore", root=DEAD, cause=1))
    assert opinion_of(entry(DEAD, kind), logs.deletions, logs.history, after_ns) == "sound"


def test_named_entries_and_those_of_other_models_are_nobody_s_violation() -> None:
    logs = Follower()
    logs.delete()
    after_ns = NOW_NS + int((GRACE_S + 1) * NS)
    assert opinion_of(entry(DEAD, "feature", "item"), logs.deletions, logs.history, after_ns) == "named"
    assert opinion_of(entry(STRANGE), logs.deletions, logs.history, after_ns) == "unknown"


def test_a_version_that_a_worker_keeps_long_after_it_was_forgotten_is_a_violation() -> None:
    history = Follower().history
    history.apply(4, NOW_NS, LogEntry(ref=Ref("stable", None, "a")))
    history.apply(5, NOW_NS, LogEntry(forget=Forget((DEAD,), "a")))
    assert opinion_of_version(LIVE, history, NOW_NS) == "sound"
    assert opinion_of_version(DEAD, history, NOW_NS + 60 * NS) == "sound", "a request may still use it"
    assert opinion_of_version(DEAD, history, NOW_NS + 3600 * NS) == "violation"
    assert opinion_of_version(STRANGE, history, NOW_NS) == "violation"


async def test_a_planted_violation_is_found_and_told() -> None:
    logs = Follower()
    logs.deletions.apply(1, 0, Invalidated("m", "delete", root=DEAD, cause=3))
    broker = MemoryBroker()
    async with memory_bus(broker) as bus, cache_node(broker, "c-0") as node:

        class OneNode:
            def live(self, service: str) -> list[Card]:
                return [node.card(0)] if service == "cache" else []

        fleet: Any = OneNode()
        follower: Any = logs
        audit = Audit(bus, fleet, follower, follower, "m", 10.0)
        for root in (LIVE, DEAD):
            node.store.put(Entry("result", root, root, "t", b"m", b"v", 1, 0.0, 1e9))
        await audit.look(10)
        assert (audit.seen["result"], audit.violations["result"]) == (2, 1)
        assert audit.told == "audited 2 entries (2 result): 1 violations"
        node.store.delete_root(DEAD)
        await audit.look(10)
        assert audit.violations["result"] == 1
