"""Compiling: once, never half, and with a reason where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.native.build import NativeUnavailable, compiled, levels


def test_a_library_is_compiled_once(library_folder: Path) -> None:
    first = compiled(levels()[0], library_folder)
    stamp = first.stat().st_mtime_ns
    assert compiled(levels()[0], library_folder) == first
    assert first.stat().st_mtime_ns == stamp
    assert {path.suffix for path in library_folder.iterdir()} == {".so"}


def test_no_compiler_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        compiled("avx2", tmp_path)


def test_a_compiler_that_fails_is_said_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such flag >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(broken))
    with pytest.raises(NativeUnavailable, match="no such flag"):
        compiled("avx2", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
