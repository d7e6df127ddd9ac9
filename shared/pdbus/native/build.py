"""Compiles the C++ sources once per machine, with the system's compiler, into the user's cache folder.

One library per instruction set, named by the digest of everything that it was made from, so that nothing stale is ever
loaded. Where no compiler is, or no such processor, NativeUnavailable says so and the torch path serves.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["avx512", "avx2"]

_SOURCES = Path(__file__).parent / "src"
# No -ffast-math and no contraction: the order of floating point is part of what is promised (DESIGN.md G9).
_FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-tree-reassoc"),
    *("-Wall", "-Wextra", "-Wno-maybe-uninitialized"),  # the last: GCC 12 warns of its own intrinsics
]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512"]
_LEVEL_FLAGS: dict[Level, list[str]] = {
    "avx512": [*_AVX2, *_AVX512],
    "avx2": _AVX2,
}
_NEEDS: dict[Level, set[str]] = {
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
}
_COMPILE_TIMEOUT_S = 180.0


class NativeUnavailable(Exception):
    """The native engine cannot serve here; the message is the reason, for the log."""


def cache_folder() -> Path:
    """Where compiled libraries lie unless told otherwise."""
    return Path.home() / ".cache" / "pdbus" / "native"


def levels() -> tuple[Level, ...]:
    """The instruction sets of this machine that there are kernels for, best first; empty on other processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    return tuple(level for level, needed in _NEEDS.items() if needed <= flags)


def compiled(level: Level, folder: Path | None = None) -> Path:
    """The library for `level`, made now if it isn't there. Takes seconds then. Raises NativeUnavailable."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise NativeUnavailable("no C++ compiler (c++, g++ or clang++) was found")
    command = [compiler, *_FLAGS, *_LEVEL_FLAGS[level], str(_SOURCES / "forward.cpp")]
    target = (folder or cache_folder()) / f"pdbus-{level}-{_digest(compiler, command[1:-1])}.so"
    if not target.exists():
        _compile(command, target)
    return target


def _digest(compiler: str, flags: list[str]) -> str:
    digest = hashlib.sha256(" ".join(flags).encode())
    digest.update(_run([compiler, "--version"]).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _compile(command: list[str], target: Path) -> None:
    """Into a file of its own first: another process that compiles the same never sees half a library."""
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            _run([*command, "-o", str(made)])
            os.replace(made, target)
    except OSError as error:
        raise NativeUnavailable(f"no library could be written to {target.parent}: {error}") from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise NativeUnavailable(f"{command[0]} failed: {error.stderr[-400:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} failed: {error}") from error
    return done.stdout
