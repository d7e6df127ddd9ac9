"""Compiling: once, never half, and with a reason where it cannot be."""

from __future__ import annotations

import ctypes
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdbus.native import build as subject
from pdbus.native.build import NativeUnavailable, compiled, ship


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


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler of our own that compiles little, and counts its runs in the file that this returns."""
    runs, fake = tmp_path / "runs", tmp_path / "c++"
    fake.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && exit 0\n'
        f"echo run >> {runs}\n"
        f'for last; do :; done; echo "int one(void) {{ return 1; }}" | {shutil.which("cc")} -shared -x c - -o "$last"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(fake))
    return runs


def test_a_library_is_compiled_once(tmp_path: Path, quick: Path) -> None:
    first = compiled("avx2", tmp_path / "cache")
    assert compiled("avx2", tmp_path / "cache") == first
    assert quick.read_text().split() == ["run"]
    assert list((tmp_path / "cache").iterdir()) == [first]


def test_several_at_once_compile_once(tmp_path: Path, quick: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: compiled("avx2", tmp_path / "cache"), range(4)))
    assert len(made) == 1
    assert quick.read_text().split() == ["run"]
    assert ctypes.CDLL(str(made.pop())).one() == 1


@pytest.mark.parametrize("content", [b"", b"\x7fELF", bytes(200_000)])
def test_a_broken_file_is_made_anew(tmp_path: Path, quick: Path, content: bytes) -> None:
    library = compiled("avx2", tmp_path / "cache")
    sound = library.read_bytes()
    library.write_bytes(content)
    assert compiled("avx2", tmp_path / "cache") == library
    assert library.read_bytes()[:4] == sound[:4]
    assert quick.read_text().split() == ["run", "run"]


def test_what_came_with_the_installation_needs_no_compiler(
    tmp_path: Path, quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "SHIPPED", tmp_path / "lib")
    shipped = ship("avx2")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert compiled("avx2", tmp_path / "cache") == shipped
    assert not (tmp_path / "cache").exists()
