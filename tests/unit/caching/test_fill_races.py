"""G4, G5: no interleaving of fills with invalidations, rollbacks and restarts leaves a stale entry (time simulated).

Fills take three steps of their own: miss → compute → put, the last on any node, as replicas get theirs. The truth moves
on its own: named things get new versions, roots leave their last ref and come back. Each node applies the
one log of invalidations in order but late, as far as it has got; it restarts empty and replays the log from the start.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from pdbus.caching.entry import ENTRY_BYTES, Entry
from pdbus.caching.fences import Fence
from pdbus.caching.store import Store
from pdbus.errors import Conflict

ROOTS = (b"\x01" * 32, b"\x02" * 32)
NAMES = ("user 1", "user 2")
ITEMS = (b"a" * 32, b"b" * 32)
LONGEST_S = 600.0
"""No fill lives longer; a second delete comes no earlier than this after its first."""
BUDGET = 12 * ENTRY_BYTES


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
    fills = Bundle("fills")

    @initialize()
    def start(self) -> None:
        self.now_s = 0.0
        self.nodes = [Node(0), Node(1)]
        self.log: list[Logged] = []
        self.version = dict.fromkeys(NAMES, 0)
        self.first_deleted_s: dict[bytes, float] = {}

    # The truth and the log

    @rule(name=st.sampled_from(NAMES))
    def a_named_thing_changes(self, name: str) -> None:
        self.version[name] += 1

    @rule(name=st.sampled_from(NAMES))
    def its_entries_are_invalidated(self, name: str) -> None:
        self.log.append(Logged(name=name, action="delete_name", version=self.version[name]))

    @rule(root=st.sampled_from(ROOTS))
    def first_delete(self, root: bytes) -> None:
        self.first_deleted_s.setdefault(root, self.now_s)
        self.log.append(Logged(root=root))

    @rule(root=st.sampled_from(ROOTS))
    def second_delete(self, root: bytes) -> None:
        if self.now_s >= self.first_deleted_s.get(root, self.now_s) + LONGEST_S:
            self.log.append(Logged(root=root, second=True))

    @rule(root=st.sampled_from(ROOTS))
    def rollback(self, root: bytes) -> None:
        self.first_deleted_s.pop(root, None)
        self.log.append(Logged(root=root, action="restore"))

    @rule(passes=st.sampled_from([0.1, 30.0, LONGEST_S]))
    def time(self, passes: float) -> None:
        self.now_s += passes

    # What nodes do

    @rule(node=st.integers(0, 1))
    def a_node_reads_on_in_the_log(self, node: int) -> None:
        at = self.nodes[node]
        if at.cursor == len(self.log):
            return
        entry = self.log[at.cursor]
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
        while self.nodes[node].cursor < len(self.log):
            self.a_node_reads_on_in_the_log(node)

    @rule(node=st.integers(0, 1), root=st.sampled_from(ROOTS), name=st.sampled_from(NAMES))
    def the_invalidator_calls_directly(self, node: int, root: bytes, name: str) -> None:
        self.nodes[node].store.delete_root(root)
        self.nodes[node].store.delete_name(name)

    # Fills

    @rule(
        target=fills, node=st.integers(0, 1), item=st.sampled_from(ITEMS), root=st.sampled_from(ROOTS),
        name=st.sampled_from(("", *NAMES)),
    )  # fmt: skip
    def miss(self, node: int, item: bytes, root: bytes, name: str) -> Fill:
        fence = self.nodes[node].store.fences.told
        return Fill(node, fence, item, root, name, self.now_s)

    @rule(target=fills, fill=consumes(fills))
    def compute(self, fill: Fill) -> Fill:
        made_from = b"%d" % self.version[fill.name] if fill.name else fill.root
        return Fill(fill.node, fill.fence, fill.item, fill.root, fill.name, fill.begun_s, made_from)

    @rule(target=fills, fill=consumes(fills), node=st.integers(0, 1))
    def put(self, fill: Fill, node: int) -> object:
        if not fill.value:
            return fill
        if self.now_s - fill.begun_s > LONGEST_S:
            return multiple()
        identity = fill.name.encode() or fill.root
        entry = Entry(
            kind="feature" if fill.name else "result", key=fill.item[:16] + identity[:16].ljust(16), root=fill.root,
            tenant="t", material=fill.item, value=fill.value, size=len(fill.value), stored_s=self.now_s,
            expires_s=self.now_s + 1000.0, name=fill.name,
        )  # fmt: skip
        try:
            self.nodes[node].store.put(entry, fill.fence)
        except Conflict:
            return multiple()
        return fill  # puts may be repeated

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
                for item in ITEMS:
                    found = node.store.get("result", item[:16] + root[:16], root, self.now_s)
                    assert found is None or found.value == root

    @invariant()
    def the_budget_holds(self) -> None:
        for node in getattr(self, "nodes", ()):
            assert node.store.used_bytes <= BUDGET


TestFillRaces = FillRaces.TestCase
TestFillRaces.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
