"""Logs of children: bounded, appended to while they are bounded, and shown when a child fails."""

from __future__ import annotations

import os
from pathlib import Path

from pdbus.stack.logfiles import LogFile


def _write(log: LogFile, text: str) -> None:
    fd = log.open()
    os.write(fd, text.encode())
    os.close(fd)


def test_the_tail_is_the_end_of_this_life_only(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")
    _write(log, "first life\n")
    since = log.size
    _write(log, "".join(f"line {n}\n" for n in range(30)))
    assert log.tail(2, since) == ["line 28", "line 29"]
    assert log.tail(100, since)[0] == "line 0"


def test_a_log_never_outgrows_its_bound_and_writers_go_on(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")
    fd = log.open()
    os.write(fd, b"x" * 1000 + b"\nlast\n")
    log.bound(max_bytes=500)
    assert log.size == 0
    assert LogFile(tmp_path / "a.log.1").tail(1) == ["last"]
    os.write(fd, b"after\n")
    os.close(fd)
    assert log.path.read_text() == "after\n"


def test_a_small_log_is_left_alone(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")
    log.bound()
    _write(log, "kept\n")
    log.bound()
    assert log.tail() == ["kept"]


def test_bytes_that_are_no_text_are_shown(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")
    (tmp_path / "a.log").write_bytes(b"\xff\xfe bad\n")
    assert log.tail()[0].endswith("bad")
