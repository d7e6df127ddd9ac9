"""How many cores a process may use: what its container grants, not what the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdbus.runtime.cores import usable_cores


@pytest.fixture(autouse=True)
def _affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def _file(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def _v2(root: Path, own: str, quotas: dict[str, str]) -> Path:
    """A file system in which this process is in the group `own`, and groups have these quotas."""
    _file(root / "proc/self/cgroup", f"0::{own}\n")
    for group, quota in quotas.items():
        _file(root / "sys/fs/cgroup" / group / "cpu.max", quota)
    return root


def test_without_control_groups_it_is_the_affinity(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("300000 100000", 3), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_a_quota_bounds_it_rounded_down_and_never_below_one(tmp_path: Path, quota: str, cores: int) -> None:
    assert usable_cores(_v2(tmp_path, "/", {"": quota})) == cores


def test_the_narrowest_of_the_groups_above_counts(tmp_path: Path) -> None:
    root = _v2(tmp_path, "/a/b", {"": "max 100000", "a": "400000 100000", "a/b": "600000 100000"})
    assert usable_cores(root) == 4


def test_a_container_that_sees_its_own_group_as_the_root_finds_it_there(tmp_path: Path) -> None:
    assert usable_cores(_v2(tmp_path, "/docker/0123abcd", {"": "200000 100000"})) == 2


@pytest.mark.parametrize(("quota", "cores"), [("150000", 1), ("-1", 8)])
def test_control_groups_of_version_1(tmp_path: Path, quota: str, cores: int) -> None:
    _file(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/x\n3:memory:/x\n0::/\n")
    for name, value in {"quota": quota, "period": "100000"}.items():
        _file(tmp_path / f"sys/fs/cgroup/cpu/x/cpu.cfs_{name}_us", value)
    assert usable_cores(tmp_path) == cores


def test_what_can_not_be_read_bounds_nothing(tmp_path: Path) -> None:
    assert usable_cores(_v2(tmp_path, "/", {"": "what is this"})) == 8
