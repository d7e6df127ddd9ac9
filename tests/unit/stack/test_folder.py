"""The data folder: one launcher at a time, and nothing stale after a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdbus.errors import Conflict
from pdbus.stack.folder import Folder, Run, RunFile

HOLD = """
import sys
from pathlib import Path
from pdbus.stack.folder import Folder, Run
folder = Folder(Path(sys.argv[1]))
with folder.lock() as lock:
    import os, subprocess
    folder.write(Run(os.getpid(), "m", url="http://127.0.0.1:1"))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=sys.stdin, pass_fds=(lock,))
    print(child.pid, flush=True)
    child.wait()
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another launcher that holds the folder, with a child that inherited the lock and ends with its input."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    assert process.stdin is not None
    process.stdin.close()
    process.stdout.close()
    process.wait()


def test_a_second_launcher_is_refused_and_told_who_runs(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(Conflict) as refused, Folder(tmp_path).lock():
        pass
    assert str(holder.pid) in refused.value.message
    assert str(tmp_path) in refused.value.message
    assert Folder(tmp_path).running() is not None


def test_after_a_killed_launcher_the_folder_is_free_once_its_children_ended(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.kill()
    holder.wait()
    folder = Folder(tmp_path)
    assert folder.running() is None
    assert folder.read() is not None
    assert holder.stdin is not None
    holder.stdin.close()  # its child ends now
    with folder.lock():
        assert folder.read() is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"launcher": 1, "model": "m", "something": "newer"}',
        '{"launcher": "1", "model": "m"}',
        '{"launcher": -1, "model": "m"}',
        '{"launcher": 99999999999999999999, "model": "m"}',
        '{"launcher": 1, "model": "m", "pids": {"router-1": [1]}}',
        "[" * 100_000,
    ],
)
def test_a_garbled_run_file_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    assert Folder(tmp_path).running() is None


def test_the_run_file_says_what_runs_and_goes_with_the_launcher(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with folder.lock():
        run_file = RunFile(folder, Run(os.getpid(), "m"))
        run_file.process("decode-1", 12)
        run_file.process("decode-1", 13)
        run_file.update(url="http://127.0.0.1:8000", ready=True)
        assert folder.running() == Run(os.getpid(), "m", url="http://127.0.0.1:8000", ready=True, pids={"decode-1": 13})
    assert folder.running() is None


def test_a_model_name_can_never_leave_the_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for name in ("a/b", "..", "."):
        assert folder.of_model(name).parent == folder.path / "models"
        assert folder.of_model(name).name not in {".", ".."}
