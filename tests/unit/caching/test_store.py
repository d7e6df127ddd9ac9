"""A cache node's memory: bounded, timed, indexed."""

from __future__ import annotations

import tracemalloc
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.caching.entry import ENTRY_BYTES, Entry
from pdbus.caching.fences import FENCE_BYTES, Fence
from pdbus.caching.store import TOMBSTONE_S, Store
from pdbus.errors import Conflict

R1, R2 = b"\x01" * 32, b"\x02" * 32


def entry(number: int, value: bytes = b"value", **changes: Any) -> Entry:
    key = sha256(b"%d" % number).digest()
    fields: dict[str, Any] = {
        "kind": "result", "key": key, "root": R1, "tenant": "t", "material": b"m%d" % number, "value": value,
        "size": len(value), "stored_s": 0.0, "expires_s": 3600.0,
    }  # fmt: skip
    return Entry(**(fields | changes))


def store(entries: int = 100) -> Store:
    return Store(entries * (ENTRY_BYTES + 200), "incarnation 1")


def test_what_was_put_is_found_until_it_expires() -> None:
    held, made = store(), entry(1, expires_s=10.0)
    assert held.put(made)
    assert held.get("result", made.key, R1, 9.9) is made
    assert held.get("result", made.key, R1, 10.0) is None
    assert len(held) == held.used_bytes == 0


def test_other_kinds_other_roots_and_too_old_entries_are_absent() -> None:
    held, made = store(), entry(1)
    held.put(made)
    assert held.get("feature", made.key, R1, 1.0) is None
    assert held.get("result", made.key, R2, 1.0) is None
    assert held.get("result", made.key, R1, 5.0, max_age_s=4.9) is None
    assert held.get("result", made.key, R1, 5.0, max_age_s=5.0) is made


def test_a_page_read_under_another_root_outlives_the_older_one() -> None:
    held, page = store(), entry(1, kind="kv")
    held.put(page)
    assert held.get("kv", page.key, R2, 1.0) is page
    assert held.bury(R1, 2.0, second=False) == 0
    assert held.get("kv", page.key, R2, 3.0) is page
    assert held.bury(R2, 4.0, second=False) == 1
    held.check()


def test_sweeping_expires_only_what_is_over() -> None:
    held = store()
    for number in range(10):
        held.put(entry(number, expires_s=float(number * 10)))
    assert held.expire(50.0) == 5
    assert len(held) == 5
    held.check()


@given(sizes=st.lists(st.integers(0, 20_000), max_size=60), budget=st.integers(0, 60_000))
def test_the_budget_is_never_exceeded(sizes: list[int], budget: int) -> None:
    held = Store(budget, "1")
    for number, size in enumerate(sizes):
        held.put(entry(number % 20, b"x" * size))
        if number % 7 == 0:
            held.bury(b"%032d" % number, float(number), second=False)
        assert held.used_bytes <= max(budget, len(held.fences) * FENCE_BYTES)
    held.check()


def test_a_value_too_large_for_its_share_is_not_kept_and_pushes_nothing_out() -> None:
    held, small = store(), entry(1)
    held.put(small)
    assert not held.put(entry(2, b"x" * (held.budget_bytes // 3)))
    assert held.get("result", small.key, R1, 1.0) is small


def test_the_charge_covers_the_memory_really_taken() -> None:
    count = 3000
    tracemalloc.start()
    try:
        held = Store(count * 2 * ENTRY_BYTES, "1")
        before = tracemalloc.get_traced_memory()[0]
        for number in range(2 * count):  # as from the wire: nothing is shared between entries
            name = f"name {number}"
            held.put(entry(number, bytes(200), root=bytes(bytearray(b"%032d" % number)), name=name), Fence("1", 0))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(held) > count / 2
    assert 0.5 * held.used_bytes < taken <= held.used_bytes


def test_the_charge_covers_fences() -> None:
    tracemalloc.start()
    try:
        held = Store(100_000_000, "1")
        before = tracemalloc.get_traced_memory()[0]
        for number in range(3000):
            held.bury(bytes(bytearray(b"%032d" % number)), 0.0, second=False)
            held.delete_name(f"a name of an ordinary length {number}")
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= held.used_bytes


def test_entries_wanted_again_stay_while_one_time_entries_pass_through() -> None:
    held = store(100)
    wanted = [entry(number) for number in range(20)]
    for made in wanted:
        held.put(made)
    for number in range(1000, 3000):
        held.put(entry(number))
        if number % 50 == 0:
            assert all(held.get("result", made.key, R1, 1.0) for made in wanted)
    assert held.evicted > 1800


def test_what_was_wanted_long_ago_leaves_in_the_end() -> None:
    held = store(100)
    old = [entry(number) for number in range(60)]
    for made in old:
        held.put(made)
        held.get("result", made.key, R1, 1.0)
    for number in range(1000, 2000):
        held.put(entry(number))
        held.get("result", entry(number).key, R1, 1.0)
    assert sum(held.get("result", made.key, R1, 2.0) is not None for made in old) < 20


def test_replacing_keeps_one_entry_and_the_newer_value() -> None:
    held = store()
    held.put(entry(1, b"older"))
    assert held.put(entry(1, b"newer value", stored_s=5.0))
    found = held.get("result", entry(1).key, R1, 6.0, max_age_s=2.0)
    assert found is not None
    assert found.value == b"newer value"
    assert len(held) == 1
    held.check()


def test_deletes_by_key_root_and_name_count_what_was_there() -> None:
    held = store()
    told = held.fences.told
    for number in range(6):
        held.put(entry(number, root=R1 if number < 3 else R2, name="n" if number % 2 else ""), told)
    assert held.delete([entry(0).key, entry(9).key]) == 1
    assert held.delete_name("n") == 3
    assert held.delete_root(R1) == 1
    assert len(held) == 1
    held.check()


def test_a_scan_walks_every_entry_once_in_key_order() -> None:
    held = store()
    for number in range(50):
        held.put(entry(number, root=R1 if number % 2 else R2))
    for root, count in ((b"", 50), (R1, 25), (b"\x03" * 32, 0)):
        seen: list[bytes] = []
        more = True
        while more:
            found, more = held.scan(seen[-1] if seen else b"", 7, root)
            seen += [item.key for item in found]
        assert seen == sorted(seen)
        assert len(seen) == len(set(seen)) == count


def test_a_buried_root_takes_no_fill_until_a_rollback_lifts_it() -> None:
    held = store()
    held.put(entry(1))
    assert held.bury(R1, 1.0, second=False) == 1
    for second in (False, True):
        held.bury(R1, 1.0, second=second)
        with pytest.raises(Conflict):
            held.put(entry(1))
    held.put(entry(2, root=R2))
    held.lift(R1)
    assert held.put(entry(1))


def test_a_named_fill_is_refused_after_a_delete_or_a_restart_since_its_miss() -> None:
    held = store()
    told = held.fences.told
    assert held.put(entry(1, name="a"), told)
    held.delete_name("a")
    with pytest.raises(Conflict):
        held.put(entry(1, name="a"), told)
    with pytest.raises(Conflict):
        held.put(entry(1, name="a"), None)
    assert held.put(entry(2, name="b"), told)
    fresh = held.fences.told
    assert held.put(entry(1, name="a"), fresh)
    held.clear("incarnation 2")
    with pytest.raises(Conflict):
        held.put(entry(1, name="a"), fresh)


def test_forgotten_fences_refuse_rather_than_admit() -> None:
    held = Store(0, "1")  # keeps 64 of either kind
    told = held.fences.told
    for number in range(200):
        held.delete_name(f"{number}")
    with pytest.raises(Conflict):
        held.fences.check(R1, "0", told)
    held.fences.check(R1, "0", held.fences.told)
    for number in range(200):
        held.bury(b"%032d" % number, 0.0, second=False)
    assert all(held.fences.buried(b"%032d" % number) for number in range(200))
    for number in range(200):
        held.bury(b"%032d" % number, 1.0, second=True)
    assert sum(held.fences.buried(b"%032d" % number) for number in range(200)) == 64
    held.bury(R1, 2.0 + TOMBSTONE_S, second=False)
    assert len(held.fences) == 64 + 1
