"""The `pdbus` command line: what it takes, and what it says when nothing runs."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from pdbus.stack import cli, up
from pdbus.stack.folder import Folder


def test_an_answer_may_be_longer_than_the_processes_are_many() -> None:
    assert cli.parser().parse_args(["chat", "--max-tokens", "4096"]).max_tokens == 4096


@pytest.mark.parametrize(
    "arguments",
    [["chat", "--max-tokens", "0"], ["chat", "--max-tokens", "x"], ["up", "--decode", "65"], ["up", "--decode", "0"]],
)
def test_what_is_no_number_of_these_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parser().parse_args(arguments)
    assert repr(arguments[-1]) in capsys.readouterr().err


def test_colocated_workers_and_prefill_workers_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["up", "--colocated", "--prefill", "1", "--model", "x.gguf", "--data", str(tmp_path)]
    assert cli.main(given) == 1
    assert "--prefill" in capsys.readouterr().err


def test_a_stack_can_do_without_cache_nodes() -> None:
    assert cli.parser().parse_args(["up", "--cache-nodes", "0"]).cache_nodes == 0


def test_chat_says_at_once_that_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(cli, "_DEFAULT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert cli.main(["chat", "--data", str(tmp_path), "hi"]) == 1
    told = capsys.readouterr().err
    assert f"nothing runs on {tmp_path}" in told
    assert "pdbus up" in told


def test_the_command_to_try_works_as_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder of the virtual environment, from elsewhere, with it on PATH; and for a folder of one's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    scripts = tmp_path / "venv" / "bin"
    scripts.mkdir(parents=True)
    (scripts / "pdbus").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.chdir(tmp_path)
    assert up._command(Folder(None), "chat") == "venv/bin/pdbus chat"
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    assert up._command(Folder(tmp_path / "a b"), "chat") == f"{scripts}/pdbus chat --data '{tmp_path}/a b'"
    monkeypatch.setenv("PATH", str(scripts))
    assert up._command(Folder(None), "chat") == "pdbus chat"
