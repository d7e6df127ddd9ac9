"""Durable ids for equal processes that share a folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from pdbus.runtime.slots import slot
from pdbus.settings import SettingsError


def test_each_holder_has_its_own_place_and_a_left_one_is_taken_up_again(tmp_path: Path) -> None:
    with slot(tmp_path, "param_server") as first:
        with slot(tmp_path, "param_server") as second:
            assert (first.name, second.name) == ("param-server-1", "param-server-2")
            assert first.is_dir()
            assert second.is_dir()
        with slot(tmp_path, "param_server") as again:
            assert again == second


def test_a_place_is_free_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), slot(tmp_path, "cache"):
        raise ValueError("inside")
    with slot(tmp_path, "cache") as place:
        assert place.name == "cache-1"


def test_a_place_too_many_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdbus.runtime.slots._MOST", 2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(slot(tmp_path, "cache"))
        with pytest.raises(SettingsError):
            stack.enter_context(slot(tmp_path, "cache"))
