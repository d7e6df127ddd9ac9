"""Which nats-server executable is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.settings import load
from pdbus.stack.nats_server import NatsServerError, find_nats_server
from pdbus.stack.settings import StackSettings


def script(path: Path, says: str) -> Path:
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_the_executable_that_the_environment_names_comes_before_the_installed_one(tmp_path: Path) -> None:
    own = script(tmp_path / "own-server", "nats-server: v2.99.0")
    named = load(StackSettings, {"NATS_SERVER_BIN": str(own)}).nats_server_bin
    assert find_nats_server(named) == own
    assert load(StackSettings, {}).nats_server_bin is None
    assert find_nats_server(None) != own


def test_an_executable_that_is_none_or_too_old_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(NatsServerError, match=r"no nats-server at .*missing"):
        find_nats_server(tmp_path / "missing")
    with pytest.raises(NatsServerError, match=r"2\.14 is needed"):
        find_nats_server(script(tmp_path / "old", "nats-server: v2.9.1"))
    with pytest.raises(NatsServerError, match="is not a nats-server"):
        find_nats_server(script(tmp_path / "other", "hello"))
