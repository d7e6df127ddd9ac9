"""Pages come back as they went, whatever was under way; the file is bounded, and a broken disk loses nothing."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from pdbus.kv.swap_file import SwapFile, Swapped

PAGE = 5000


def body(seed: int, pages: int) -> memoryview:
    return memoryview(random.Random(seed).randbytes(pages * PAGE))


def settled(file: SwapFile) -> None:
    """All that was under way is done."""
    file._thread.submit(lambda: None).result(10)


def back(file: SwapFile, swapped: Swapped) -> bytes:
    came = threading.Event()
    if not file.fetch(swapped, came.set):
        assert came.wait(60)
        assert file.fetch(swapped, came.set)
    assert swapped.body is not None
    return bytes(swapped.body)


def test_pages_come_back_from_the_file_as_they_went(tmp_path: Path) -> None:
    with SwapFile(tmp_path / "new", 10 * PAGE, PAGE) as file:
        saved = [file.save(body(seed, pages)) for seed, pages in enumerate((3, 1, 4))]
        settled(file)
        assert all(one is not None and one.body is None for one in saved)
        for seed, pages in ((1, 1), (2, 4), (0, 3)):
            one = saved[seed]
            assert one
            assert back(file, one) == body(seed, pages)
            file.free(one)
            file.free(one)
        assert file.free_slots == 10


def test_what_is_needed_again_at_once_never_waits_for_the_disk() -> None:
    with SwapFile(None, 10 * PAGE, PAGE) as file:
        gate = threading.Event()
        file._thread.submit(gate.wait)
        saved = file.save(body(1, 2))
        assert saved
        assert file.fetch(saved, lambda: None)
        gate.set()
        settled(file)
        assert saved.body == body(1, 2)


def test_slots_are_used_again_without_mixing_what_is_under_way() -> None:
    with SwapFile(None, 4 * PAGE, PAGE) as file:
        first = file.save(body(1, 3))
        assert first
        file.free(first)  # cancelled while it was written
        second = file.save(body(2, 4))
        assert second
        settled(file)
        assert back(file, second) == body(2, 4)


def test_no_more_than_the_budget_is_taken(tmp_path: Path) -> None:
    with SwapFile(tmp_path, 4 * PAGE + 1, PAGE) as file:
        assert file.save(body(1, 5)) is None
        assert file.save(body(1, 3))
        assert file.save(body(1, 2)) is None
        assert list(tmp_path.iterdir()) == [], "nothing is left, however the process ends"
    with SwapFile(tmp_path, 0, PAGE) as off:
        assert off.save(body(1, 1)) is None


def test_a_full_disk_loses_nothing_and_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with SwapFile(None, 4 * PAGE, PAGE) as file:
        monkeypatch.setattr("pdbus.kv.swap_file.os.pwrite", full)
        saved = file.save(body(1, 2))
        assert saved
        settled(file)
        assert back(file, saved) == body(1, 2)
        assert file.save(body(1, 1)) is None


def test_a_folder_that_can_t_be_used_means_no_swap(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with SwapFile(tmp_path / "file", 4 * PAGE, PAGE) as file:
        assert file.save(body(1, 1)) is None
