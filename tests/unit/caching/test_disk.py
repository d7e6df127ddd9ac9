"""The disk below a node's memory: what it holds, for how long, and what it never gives back."""

from __future__ import annotations

import random
import tracemalloc
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.caching.disk import DiskStore
from pdbus.caching.disk_entry import RECORD_BYTES, DiskEntry
from pdbus.caching.entry import Entry
from pdbus.caching.store import TOMBSTONE_S
from pdbus.checksum import crc32
from pdbus.errors import Corrupt

R1, R2 = b"\x01" * 32, b"\x02" * 32
WALL_S = 1_000_000.0
BUDGET = 16 * 4096


def key(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def value_of(number: int, size: int = 600) -> bytes:
    return random.Random(number).randbytes(size)


def entry(number: int, size: int = 600, **changes: Any) -> Entry:
    fields: dict[str, Any] = {
        "kind": "kv", "key": key(number), "root": R1, "tenant": "ténant", "material": b"m%d" % number,
        "value": value_of(number, size), "size": size, "stored_s": 0.0, "expires_s": 3600.0,
    }  # fmt: skip
    return Entry(**(fields | changes))


def opened(folder: Path, *, wall_s: float = WALL_S, most: int = 1000) -> DiskStore:
    disk = DiskStore(folder, BUDGET, most, wall_s)
    disk.open()
    return disk


def put(disk: DiskStore, made: Entry) -> bool:
    """As the tier writes it: room is made where there is none, and what is hot moves on."""
    placed = disk.begin(made)
    if placed is None:
        for hot in disk.retire():
            fields = {"key": hot.head.key, "root": hot.root, "value": bytes(disk.read(hot)), "size": hot.size}
            times = {"stored_s": hot.stored_s, "expires_s": hot.expires_s}
            moved = disk.begin(entry(0, material=hot.material, **fields, **times))
            if moved:
                disk.write(moved, bytes(disk.read(hot)))
                disk.commit(moved)
        disk.remove_retired()
        placed = disk.begin(made)
    if placed is None:
        return False
    disk.write(placed, made.value)
    return disk.commit(placed)


def got(disk: DiskStore, number: int, root: bytes = R1, now_s: float = 1.0) -> bytes | None:
    found = disk.get(key(number), root, now_s)
    return bytes(disk.read(found)) if found else None


def test_what_was_written_is_found_until_it_expires(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    assert put(disk, entry(1, expires_s=10.0))
    found = disk.get(key(1), R1, 9.9)
    assert found
    assert (found.size, found.material, found.head.tenant) == (600, b"m1", "ténant")
    assert (got(disk, 1), got(disk, 1, now_s=10.0), got(disk, 2)) == (value_of(1), None, None)
    assert disk.get(key(1), R1, 5.0, max_age_s=4.0) is None
    assert disk.expire(10.0) == 1
    disk.check()


def test_another_life_finds_it_again_as_old_as_it_is(tmp_path: Path) -> None:
    first = opened(tmp_path)
    for number in range(20):
        put(first, entry(number, expires_s=100.0))
    again = opened(tmp_path, wall_s=WALL_S + 50)  # the machine was started anew; 50 s more have passed by the wall
    assert [got(again, number) for number in range(20)] == [value_of(number) for number in range(20)]
    found = again.get(key(3), R1, 1.0)
    assert found
    assert (found.stored_s, found.expires_s) == (-50.0, 50.0)
    assert again.get(key(3), R1, 50.0) is None
    again.check()


def test_no_entry_outlives_the_log_of_invalidations(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    put(disk, entry(1, expires_s=1e9))
    assert disk.get(key(1), R1, TOMBSTONE_S / 2) is None


def test_what_is_deleted_stays_so_in_the_next_life(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for number in range(6):
        put(disk, entry(number, root=R1 if number % 2 else R2))
    assert disk.delete([key(0), key(0), key(99)]) == 1
    assert disk.delete_root(R1) == 3
    assert [number for number in range(6) if got(disk, number, R2)] == [2, 4]
    disk.sweep(disk.unmarked())
    disk.check()
    again = opened(tmp_path)
    assert [number for number in range(6) if got(again, number, R2)] == [2, 4]


def test_what_is_deleted_while_it_is_written_is_never_found(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    by_root, by_key, all_of_it = (disk.begin(entry(number)) for number in range(3))
    assert by_root
    assert by_key
    assert all_of_it
    assert key(0) in disk
    disk.delete([key(1)])
    disk.delete_root(R1)
    for placed in (by_root, by_key):
        disk.write(placed, placed.head.key)
        assert not disk.commit(placed)
    disk.sweep(disk.unmarked())
    disk.clear()
    disk.write(all_of_it, b"")
    assert not disk.commit(all_of_it)
    assert (len(disk), len(opened(tmp_path))) == (0, 0)


def test_a_page_read_under_another_root_belongs_to_that_one(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    put(disk, entry(1))
    assert got(disk, 1, R2)
    assert disk.delete_root(R1) == 0
    assert disk.delete_root(R2) == 1
    disk.check()


def test_the_budget_is_kept_and_what_is_read_stays(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    for number in range(400):
        assert put(disk, entry(number))
        assert got(disk, 0) == value_of(0), "it was read all the time"
        disk.check()
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) == disk.used_bytes <= BUDGET
    assert got(disk, 399) == value_of(399)
    assert got(disk, 1) is None
    assert 40 < len(disk) < 100


def test_what_is_too_large_is_told_before(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    assert disk.fits(entry(1, 1500))
    assert not disk.fits(entry(1, BUDGET // 16))


def test_the_index_is_bounded(tmp_path: Path) -> None:
    disk = opened(tmp_path, most=10)
    for number in range(50):
        put(disk, entry(number))
        assert len(disk) <= 10
    assert len(opened(tmp_path, most=5)) <= 5


@pytest.mark.parametrize("damage", ["torn", "head", "value", "emptied", "foreign"])
def test_damage_costs_what_is_damaged_and_never_gives_other_bytes(tmp_path: Path, damage: str) -> None:
    disk = opened(tmp_path)
    for number in range(5):
        put(disk, entry(number))
    found = [disk.get(key(number), R1, 1.0) for number in range(5)]
    third = found[3]
    assert third
    path, content = third.segment.path, bytearray(third.segment.path.read_bytes())
    match damage:
        case "torn":  # a crash in the middle of the fourth record
            del content[third.offset + 200 :]
        case "head":
            content[third.offset + 40] ^= 1
        case "value":
            content[third.offset + third.head.value_at] ^= 1
        case "emptied":
            content = bytearray()
        case "foreign":
            (tmp_path / "00000000.kv").write_bytes(random.Random(1).randbytes(5000))
    path.write_bytes(content)
    again = opened(tmp_path)
    answers: list[bytes | None] = []
    for number in range(5):
        try:
            answers.append(got(again, number))
        except Corrupt:
            answers.append(None)
    expected: list[bytes | None] = [value_of(number) for number in range(5)]
    if damage == "emptied":
        expected = [None] * 5
    elif damage == "value":
        expected[3] = None
    elif damage != "foreign":
        expected[3:] = [None, None]
    assert answers == expected
    assert put(again, entry(9))
    again.check()


@pytest.mark.parametrize("name", ["x.kv", "-1.kv"])
def test_a_file_of_another_name_is_none_of_its_own(tmp_path: Path, name: str) -> None:
    disk = opened(tmp_path)
    put(disk, entry(1))
    next(tmp_path.glob("*.kv")).rename(tmp_path / name)
    disk = opened(tmp_path)
    assert len(disk) == 0
    assert put(disk, entry(2))


def test_a_sound_record_of_a_tenant_that_is_no_text_ends_the_file(tmp_path: Path) -> None:
    """Somebody else's writing, or damage that the checksum missed."""
    disk = opened(tmp_path)
    put(disk, entry(1))
    path = next(tmp_path.glob("*.kv"))
    content = bytearray(path.read_bytes())
    at = content.index("ténant".encode())
    content[at + 1] = 0xFF
    head = content[: at - 4] + bytes(4)
    content[at - 4 : at] = crc32(bytes(head) + content[at : at + len("ténant".encode()) + len(b"m1")]).to_bytes(
        4, "little"
    )
    path.write_bytes(content)
    assert len(opened(tmp_path)) == 0


def test_a_reader_keeps_what_it_has_when_the_file_goes(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    put(disk, entry(1))
    found = disk.get(key(1), R1, 1.0)
    assert found
    value = disk.read(found)
    disk.clear()
    assert list(tmp_path.glob("*.kv")) == []
    assert (bytes(value), bytes(disk.read(found))) == (value_of(1), value_of(1))


def test_a_failed_write_loses_only_itself(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    put(disk, entry(1))
    hole = disk.begin(entry(2))
    assert hole
    assert not disk.commit(hole, written=False)
    put(disk, entry(3))
    assert [number for number in range(5) if got(opened(tmp_path), number)] == [1, 3]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "delete", "root", "reopen", "begin", "commit"]), st.integers(0, 30)),
    max_size=80,
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_any_order_of_things_keeps_the_invariants(tmp_path_factory: Any, operations: list[tuple[str, int]]) -> None:
    """Against a dict that never gives anything up: an entry may be missing, but never wrong, deleted or of old."""
    folder = tmp_path_factory.mktemp("disk")
    disk, model, writing = opened(folder), dict[int, bytes](), dict[int, DiskEntry]()
    for operation, number in operations:
        root = R1 if number % 3 else R2
        match operation:
            case "put" if key(number) not in disk:
                if put(disk, entry(number, root=root)):
                    model[number] = root
            case "begin" if key(number) not in disk:
                if placed := disk.begin(entry(number, root=root)):
                    writing[number] = placed
            case "commit" if number in writing:
                disk.write(writing[number], value_of(number))
                if disk.commit(writing.pop(number)):
                    model[number] = root
            case "delete":
                disk.delete([key(number)])
                model.pop(number, None)
            case "root":
                disk.delete_root(root)
                model = {other: its for other, its in model.items() if its != root}
            case "reopen":
                disk.sweep(disk.unmarked())
                for placed in writing.values():  # the process died before it knew
                    placed.void = True
                disk, writing = opened(folder), {}
            case "get":
                found = got(disk, number, root)
                assert found is None or (number in model and found == value_of(number))
        disk.check()
    for number in range(31):
        found = got(disk, number)
        assert found is None or (number in model and found == value_of(number))


def test_the_charge_covers_the_memory_of_the_index(tmp_path: Path) -> None:
    count = 2000
    tracemalloc.start()
    try:
        disk = DiskStore(tmp_path, 16 << 20, count * 2, WALL_S)
        disk.open()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            put(disk, entry(number, 64, root=bytes(bytearray(b"%032d" % number)), material=bytes(64)))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(disk) == count
    assert taken / count < RECORD_BYTES
