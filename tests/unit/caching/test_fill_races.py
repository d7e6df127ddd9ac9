"""G4, G5: no interleaving of fills with invalidations, rollbacks and restarts leaves a stale entry (time simulated).

Fills take three steps of their own: miss → compute → put, the last on any node, as replicas get theirs. The truth moves
on its own: named things get new versions, roots leave their last ref and come back. Each node applies the
one log of invalidations in order but late, as far as it has got; it restarts empty and replays the log from the start.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdbus.caching.entry import ENTRY_BYTES, Entry
from pdbus.caching.fences import Fence
from pdbus.caching.store import Store
from pdbus.errors import Conflict

ROOTS = (b"\x01" * 32, b"\x02" * 32)
NAMES = ("user 1",)
ITEM = b"a" * 16
STAYING = b"\x03" * 32
"""The root of named entries here: their names are what changes."""
LONGEST_S = 600.0
"""No fill lives longer; a second delete comes no earlier than this after its first."""
BUDGET = 40 * ENTRY_BYTES


@dataclass(frozen=True)
class Logged:
    root: bytes = b""
    name: str = ""
    action: str = "delete"
    second: bool = False
    version: int = 0


@dataclass(frozen=True)
class Fill:
    node: int
    fence: Fence
    item: bytes
    root: bytes
    name: str
    begun_s: float
    value: bytes = b""


class Node:
    def __init__(self, name: int) -> None:
        self.name = name
        self.lives = 0
        self.restart()

    def restart(self) -> None:
        self.lives += 1
        self.store = Store(BUDGET, f"{self.name}.{self.lives}")
        self.cursor = 0
        self.invalid_below: dict[str, int] = defaultdict(int)
        """Of the log as far as applied: versions below this of a name are stale."""
        self.dead: set[bytes] = set()


class FillRaces(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.now_s = 0.0
        self.nodes = [Node(0), Node(1)]
        self.log: list[Logged] = []
        self.version = dict.fromkeys(NAMES, 0)
        self.first_deleted_s: dict[bytes, float] = {}
        self.fills: list[Fill] = []

    # The truth and the log

    @rule(name=st.sampled_from(NAMES), changes=st.booleans(), told=st.booleans())
    def a_named_thing_changes(self, name: str, changes: bool, told: bool) -> None:
        self.version[name] += changes
        if told:
            self.log.append(Logged(name=name, action="delete_name", version=self.version[name]))

    @rule(root=st.sampled_from(ROOTS), event=st.sampled_from(("first", "second", "rollback", "rollback")))
    def a_root_leaves_or_comes_back(self, root: bytes, event: str) -> None:
        if event == "first":
            self.first_deleted_s.setdefault(root, self.now_s)
            self.log.append(Logged(root=root))
        elif event == "rollback":
            self.first_deleted_s.pop(root, None)
            self.log.append(Logged(root=root, action="restore"))
        elif self.now_s >= self.first_deleted_s.get(root, self.now_s) + LONGEST_S:
            self.log.append(Logged(root=root, second=True))

    @rule(passes=st.sampled_from([0.1, 1.0, 30.0, LONGEST_S]))
    def time(self, passes: float) -> None:
        self.now_s += passes

    # What nodes do

    @rule(node=st.integers(0, 1), entries=st.integers(1, 5))
    def a_node_reads_on_in_the_log(self, node: int, entries: int) -> None:
        at = self.nodes[node]
        for entry in self.log[at.cursor : at.cursor + entries]:
            at.cursor += 1
            if entry.action == "delete":
                at.store.bury(entry.root, self.now_s, entry.second)
                at.dead.add(entry.root)
            elif entry.action == "restore":
                at.store.lift(entry.root)
                at.dead.discard(entry.root)
            else:
                at.store.delete_name(entry.name)
                at.invalid_below[entry.name] = max(at.invalid_below[entry.name], entry.version)

    @rule(node=st.integers(0, 1))
    def a_node_restarts_and_catches_up(self, node: int) -> None:
        self.nodes[node].restart()
        self.a_node_reads_on_in_the_log(node, len(self.log))

    @rule(node=st.integers(0, 1), root=st.sampled_from(ROOTS), name=st.sampled_from(NAMES))
    def the_invalidator_calls_directly(self, node: int, root: bytes, name: str) -> None:
        self.nodes[node].store.delete_root(root)
        self.nodes[node].store.delete_name(name)

    # Fills

    @rule(node=st.integers(0, 1), root=st.sampled_from(ROOTS), computes=st.booleans())
    def miss(self, node: int, root: bytes, computes: bool) -> None:
        for name in ("", *NAMES):
            fence = self.nodes[node].store.fences.told
            self.fills.append(Fill(node, fence, ITEM, STAYING if name else root, name, self.now_s))
        if computes:
            self.compute()

    @rule()
    def compute(self) -> None:
        for at, fill in enumerate(self.fills):
            if not fill.value:
                made_from = b"%d" % self.version[fill.name] if fill.name else fill.root
                self.fills[at] = replace(fill, value=made_from)

    @rule(chosen=st.integers(0, 10), elsewhere=st.booleans())
    def put(self, chosen: int, elsewhere: bool) -> None:
        self.fills = [fill for fill in self.fills if self.now_s - fill.begun_s <= LONGEST_S]
        ready = [fill for fill in self.fills if fill.value]
        if not ready:
            self.miss(node=int(elsewhere), root=ROOTS[0], computes=True)
            return
        fill = ready[chosen % len(ready)]  # it stays: puts may be repeated
        node = fill.node ^ elsewhere
        identity = fill.name.encode() or fill.root
        entry = Entry(
            kind="feature" if fill.name else "result", key=fill.item + identity[:16].ljust(16), root=fill.root,
            tenant="t", material=fill.item, value=fill.value, size=len(fill.value), stored_s=self.now_s,
            expires_s=self.now_s + 1000.0, name=fill.name,
        )  # fmt: skip
        with contextlib.suppress(Conflict):
            self.nodes[node].store.put(entry, fill.fence)

    # What must hold at any time

    @invariant()
    def no_stale_entry_is_held(self) -> None:
        for node in getattr(self, "nodes", ()):
            node.store.check()
            entries, more = node.store.scan(b"", 1000)
            assert not more
            for entry in entries:
                assert entry.root not in node.dead, "an entry of a deleted root survived"
                if entry.name:
                    assert int(entry.value) >= node.invalid_below[entry.name], "a stale named entry survived"

    @invariant()
    def a_read_gives_only_what_was_made_from_its_root(self) -> None:
        for node in getattr(self, "nodes", ()):
            for root in ROOTS:
                found = node.store.get("result", ITEM + root[:16], root, self.now_s)
                assert found is None or found.value == root

    @invariant()
    def the_budget_holds(self) -> None:
        for node in getattr(self, "nodes", ()):
            assert node.store.used_bytes <= BUDGET


TestFillRaces = FillRaces.TestCase
TestFillRaces.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


STEPS: dict[str, Callable[[FillRaces], None]] = {
    "changes": lambda world: world.a_named_thing_changes(NAMES[0], changes=True, told=True),
    "first delete": lambda world: world.a_root_leaves_or_comes_back(ROOTS[0], "first"),
    "second delete": lambda world: (world.time(LONGEST_S), world.a_root_leaves_or_comes_back(ROOTS[0], "second"))[0],
    "rollback": lambda world: world.a_root_leaves_or_comes_back(ROOTS[0], "rollback"),
    "reads on": lambda world: world.a_node_reads_on_in_the_log(0, 9),
    "restarts": lambda world: world.a_node_restarts_and_catches_up(0),
    "direct call": lambda world: world.the_invalidator_calls_directly(0, ROOTS[0], NAMES[0]),
    "miss": lambda world: world.miss(0, ROOTS[0], computes=False),
    "compute": lambda world: world.compute(),
    "put named": lambda world: world.put(1, elsewhere=False),
    "put result": lambda world: world.put(0, elsewhere=False),
}
FILL = ("miss", "compute", "put named", "put result")


@pytest.mark.parametrize("first", sorted(STEPS.keys() - FILL))
def test_every_interleaving_of_a_fill_with_three_events(first: str) -> None:
    others = sorted(STEPS.keys() - FILL)
    for events in ((first, second, third) for second in others for third in others):
        for places in itertools.combinations(range(len(FILL) + len(events)), len(events)):
            world = FillRaces()
            world.start()
            fill, event = iter(FILL), iter(events)
            for at in range(len(FILL) + len(events)):
                STEPS[next(event) if at in places else next(fill)](world)
            STEPS["reads on"](world)
            world.no_stale_entry_is_held()
            world.a_read_gives_only_what_was_made_from_its_root()
