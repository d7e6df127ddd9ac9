"""G5 in the tiers of KV: whatever is being written to the disk, moved there, or brought back to memory when a root is
deleted, rolled back to, or the node restarts, no page of a deleted root is left in any tier (time simulated).

Two of the three roots have the same KV: their pages have the same keys, and belong to whoever read them last.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdbus.cache.disk_tier import DiskTier
from pdbus.caching.disk import DiskStore
from pdbus.caching.disk_entry import DiskEntry
from pdbus.caching.entry import ENTRY_BYTES, Entry
from pdbus.caching.store import Store
from pdbus.errors import Conflict

ROOTS = (b"\x01" * 32, b"\x02" * 32, b"\x03" * 32)
KV = dict(zip(ROOTS, (b"x", b"x", b"y"), strict=True))
ITEMS = range(4)
VALUE = b"v" * 600
MEMORY = 3 * (ENTRY_BYTES + 4 * len(VALUE))
DISK = 16 * 4096


def key_of(root: bytes, item: int) -> bytes:
    return sha256(KV[root] + bytes([item])).digest()


class TierRaces(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.log: list[tuple[str, bytes]] = []
        self.lives = 0
        self.live()

    def live(self) -> None:
        """A node's life begins: with what the last one left on the disk, and with the log from its start."""
        self.lives += 1
        self.now_s = 0.0
        self.disk = DiskStore(self.folder, DISK, 100, 1e6)
        self.disk.open()
        self.tier = DiskTier(self.disk)
        self.store = Store(MEMORY, f"life {self.lives}", self.tier)
        self.buried: set[bytes] = set()
        self.writing: list[tuple[DiskEntry, Entry | None]] = []
        self.reading: list[DiskEntry] = []
        for action, root in self.log:
            self.apply(action, root)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def apply(self, action: str, root: bytes) -> None:
        if action == "delete":
            self.store.bury(root, self.now_s, second=False)
            self.buried.add(root)
        else:
            self.store.lift(root)
            self.buried.discard(root)

    @rule(root=st.sampled_from(ROOTS), action=st.sampled_from(["delete", "delete", "restore"]), times=st.integers(1, 2))
    def the_log_goes_on(self, root: bytes, action: str, times: int) -> None:
        self.log.append((action, root))
        for _ in range(times):  # an entry may be applied again
            self.apply(action, root)

    @rule(root=st.sampled_from(ROOTS), item=st.sampled_from(ITEMS))
    def a_page_is_stored(self, root: bytes, item: int) -> None:
        made = Entry("kv", key_of(root, item), root, "t", b"m", VALUE, len(VALUE), self.now_s, self.now_s + 3600)
        with contextlib.suppress(Conflict):
            self.store.put(made)

    @rule(root=st.sampled_from(ROOTS), item=st.sampled_from(ITEMS))
    def a_page_is_read(self, root: bytes, item: int) -> None:
        """As a node's handlers do."""
        key = key_of(root, item)
        if self.store.get("kv", key, root, self.now_s) is None and root not in self.buried:
            found = self.disk.get(key, root, self.now_s)
            if found is not None:
                self.reading.append(found)

    @rule()
    def what_was_read_from_the_disk_comes_to_memory(self) -> None:
        for found in self.reading:
            with contextlib.suppress(Conflict):
                if not found.void:
                    self.store.put(found.with_value(bytes(self.disk.read(found))))
        self.reading.clear()

    @rule()
    def a_write_to_the_disk_begins(self) -> None:
        begun = {entry.key for entry, _ in self.writing}
        for key, entry in self.tier._waiting.items():
            if key not in begun and (placed := self.disk.begin(entry)):
                self.writing.append((placed, entry))
                return

    @rule()
    def the_oldest_segment_is_given_up(self) -> None:
        """What of it was read moves on, which is not done yet."""
        if not self.writing:
            for entry in self.disk.retire():
                if placed := self.disk.begin(entry.with_value(bytes(self.disk.read(entry)))):
                    self.writing.append((placed, None))

    @rule(chosen=st.integers(0, 3), fails=st.booleans())
    def a_write_to_the_disk_ends(self, chosen: int, fails: bool) -> None:
        if not self.writing:
            return
        placed, entry = self.writing.pop(chosen % len(self.writing))
        if not fails:
            self.disk.write(placed, VALUE)
        self.disk.commit(placed, not fails)
        if entry is not None and self.tier._waiting.get(placed.key) is entry:
            self.tier._take_back(placed.key)
        if not self.writing:
            self.disk.remove_retired()

    @rule()
    def the_node_restarts(self) -> None:
        self.live()

    @rule()
    def the_node_has_lost_entries_of_the_log(self) -> None:
        """It forgets everything, and takes up the log again."""
        self.store.clear(f"life {self.lives} anew")
        self.writing.clear()
        self.reading.clear()
        buried, self.buried = self.buried, set()
        for root in buried:
            self.apply("delete", root)

    @invariant()
    def no_page_of_a_deleted_root_is_in_any_tier(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check()
        self.disk.check()
        memory, _ = self.store.scan(b"", 1000)
        below, _ = self.disk.scan(b"", 1000)
        for held in (*memory, *below, *self.tier._waiting.values()):
            assert held.root not in self.buried
            assert held.key in {key_of(held.root, item) for item in ITEMS}


TestTierRaces = TierRaces.TestCase
TestTierRaces.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
