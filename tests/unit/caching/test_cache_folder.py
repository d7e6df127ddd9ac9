"""A folder that processes share: bounded, evicted by worth, without half files, and no error where the disk refuses."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.caching import cache_folder as subject
from pdbus.caching.cache_folder import CacheFolder
from pdbus.caching.worth import Worths, victims
from pdbus.canonical import content_digest

SIZE = 4096


def block(number: int) -> bytes:
    return number.to_bytes(4, "big") * (SIZE // 4)


def key(number: int) -> bytes:
    return content_digest(block(number))


def put(folder: CacheFolder, number: int, name: str | None = None) -> bool:
    return folder.write("blocks", key(number), (name or str(number), 0), block(number))


def has(folder: CacheFolder, number: int) -> bool:
    return folder.find("blocks", key(number)) is not None


def read(folder: CacheFolder, number: int, name: str | None = None) -> bytes | None:
    place = bytearray(SIZE)
    found = folder.read("blocks", key(number), (name or str(number), 0), memoryview(place))
    return bytes(place) if found else None


def on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*/*/*"))


def test_what_was_written_is_read_by_any_process(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 1 << 20)
    assert read(folder, 1) is None
    assert put(folder, 1)
    assert read(folder, 1) == block(1)
    assert read(CacheFolder(tmp_path, 1 << 20), 1) == block(1)


def test_the_budget_is_kept(tmp_path: Path) -> None:
    budget = 32 * SIZE
    folder = CacheFolder(tmp_path, budget)
    for number in range(200):
        assert put(folder, number)
        assert on_disk(tmp_path) <= budget
    assert folder.counts["evicted"] >= 168
    assert has(folder, 199)


def test_a_smaller_budget_is_kept_from_the_start(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 1 << 20)
    for number in range(20):
        put(folder, number)
    CacheFolder(tmp_path, 8 * SIZE)
    assert on_disk(tmp_path) <= 8 * SIZE


def test_what_is_read_often_stays_and_what_is_replaced_often_goes(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 32 * SIZE)
    for number in range(8):  # stay the same, and are read again and again
        put(folder, number)
    for number in range(100, 108):
        put(folder, number, name=f"changing {number % 8}")
    for turn in range(1, 40):
        for number in range(8):
            assert read(folder, number) == block(number)
            changed = 1000 * turn + number
            put(folder, changed, name=f"changing {number}")
            read(folder, changed, name=f"changing {number}")
    assert all(has(folder, number) for number in range(8))


def test_a_restart_forgets_no_worth(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 32 * SIZE)
    for number in range(8):
        put(folder, number)
        for _ in range(5):
            read(folder, number)
    again = CacheFolder(tmp_path, 32 * SIZE)
    for number in range(100, 150):
        put(again, number)
    assert all(has(again, number) for number in range(8))


def test_a_file_of_another_size_is_damaged(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 1 << 20)
    put(folder, 1)
    path = folder.find("blocks", key(1))
    assert path
    path.write_bytes(b"short")
    assert read(folder, 1) is None
    assert not has(folder, 1)
    assert folder.counts["damaged"] == 1


def test_a_full_disk_is_no_error_and_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CacheFolder(tmp_path, 1 << 20)
    tried: list[Path] = []

    def full(path: Path, content: Any) -> int:
        tried.append(path)
        path.open("wb").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert not put(folder, 1)
    assert not put(folder, 2)
    assert len(tried) == 1
    assert not [*tmp_path.glob("*/new-*")]
    monkeypatch.undo()
    monkeypatch.setattr(subject, "_SILENT_S", 0.0)
    folder._silent_until_s = 0.0
    assert put(folder, 1)


def test_a_folder_that_vanishes_is_as_if_nothing_were_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CacheFolder(tmp_path / "cache", 1 << 20)
    put(folder, 1)
    shutil.rmtree(tmp_path / "cache")
    assert read(folder, 1) is None
    assert not put(folder, 2)


def test_the_last_bytes_of_a_disk_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CacheFolder(tmp_path, 1 << 20)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(subject.shutil, "disk_usage", lambda path: usage._replace(free=SIZE))
    assert not put(folder, 1)
    assert folder.counts["refused"] == 1


WRITES = """
import sys
from pathlib import Path
from pdbus.caching.cache_folder import CacheFolder
from tests.unit.caching.test_cache_folder import key, block, put, read
folder = CacheFolder(Path(sys.argv[1]), 40 * 4096)
print("begun", flush=True)
number = 0
while True:
    number += 1
    put(folder, number % 97)
    found = read(folder, number % 89)
    assert found in (None, block(number % 89))
"""


def test_processes_share_it_and_one_that_is_killed_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", WRITES, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    try:
        for process in running:
            assert process.stdout
            assert process.stdout.readline() == b"begun\n"
        folder = CacheFolder(tmp_path, 40 * SIZE)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            for number in range(97):
                assert read(folder, number) in (None, block(number))
    finally:
        for process in running:
            process.send_signal(signal.SIGKILL)
        errors = [process.communicate()[1] for process in running]
    assert errors == [b"", b""]
    for file in tmp_path.glob("blocks/*/*"):
        assert content_digest(file.read_bytes()).hex() == file.name
    (tmp_path / "blocks" / "new-1-1").write_bytes(b"half")
    monkeypatch.setattr(subject, "_LEFTOVER_S", -1.0)
    CacheFolder(tmp_path, 40 * SIZE)
    assert not [*tmp_path.glob("*/new-*")]
    assert on_disk(tmp_path) <= 40 * SIZE * 1.25


def test_only_one_process_evicts_at_a_time(tmp_path: Path) -> None:
    import fcntl

    folder = CacheFolder(tmp_path, 8 * SIZE)
    with (tmp_path / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for number in range(20):
            put(folder, number)
        assert folder.counts["evicted"] == 0
    put(folder, 21)
    assert on_disk(tmp_path) <= 8 * SIZE


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), max_size=60))
def test_worth_grows_with_reads_and_falls_with_updates(reads: list[tuple[str, int]]) -> None:
    worths = Worths()
    for name, content in reads:
        worths.read((name, 0), bytes([content]))
    first = worths.read(("x", 0), b"1")
    second = worths.read(("x", 0), b"1")
    assert second > first
    assert worths.read(("x", 0), b"2") < second + 1  # one more read, but of another content
    assert worths.read(("y", 0), b"1") == worths.floor + 1


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9)), max_size=40), st.integers(0, 200))
def test_victims_are_those_worth_least_and_no_more_than_needed(files: list[tuple[float, int]], to_free: int) -> None:
    listed = [(worth, size, str(number)) for number, (worth, size) in enumerate(files)]
    chosen = victims(listed, to_free)
    freed = sum(size for _, size, _ in chosen)
    assert freed >= min(to_free, sum(size for _, size, _ in listed))
    if chosen:
        assert freed - chosen[-1][1] < to_free
        left = [one for one in listed if one not in chosen]
        assert all(one[0] >= chosen[-1][0] for one in left)


def test_counts_of_old_names_are_given_up() -> None:
    worths = Worths(most_names=2)
    for name in "abc":
        worths.read((name, 0), b"1")
    assert worths.read(("a", 0), b"1") == 1


def test_an_unusable_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        CacheFolder(tmp_path / "file" / "cache", 1 << 20)
    assert os.path.exists(tmp_path / "file")
