"""Compiles the C++ sources once per machine, with the system's compiler, into the user's cache folder.

One library per instruction set, named by the digest of everything that it was made from, so that nothing stale is ever
loaded, and followed by the digest of its own bytes, so that nothing broken is. An image without a compiler carries
libraries beside this file (`python -m pdbus.native`). Where there is neither, or no such processor, NativeUnavailable
says so and the torch path serves.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["avx512", "avx2"]
LEVELS: tuple[Level, ...] = ("avx512", "avx2")
"""Best first."""

_SOURCES = Path(__file__).parent / "src"
SHIPPED = Path(__file__).parent / "lib"
"""Libraries that came with the installation; none in a plain one."""
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


def kernel_version() -> str:
    """Changes with whatever could change a number that the kernels compute. The same on all machines."""
    return _source_digest([])[:8]


def compiled(level: Level, folder: Path | None = None) -> Path:
    """The library for `level`, made now if it isn't there. Takes seconds then, once: others wait for whoever began.

    Raises NativeUnavailable."""
    name = f"pdbus-{level}-{_source_digest(_LEVEL_FLAGS[level])[:16]}"
    if _sound(shipped := SHIPPED / f"{name}.so"):
        return shipped
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise NativeUnavailable("no C++ compiler (c++, g++ or clang++) was found")
    version = hashlib.sha256(_run([compiler, "--version"]).encode()).hexdigest()[:8]
    target = (folder or cache_folder()) / f"{name}-{version}.so"
    if not _sound(target):
        _compile(target, level, compiler)
    return target


def ship(level: Level) -> Path:
    """Compiles the library for `level`, which this machine need not have, into the installation itself."""
    compiler = shutil.which("c++") or "g++"
    SHIPPED.mkdir(mode=0o755, exist_ok=True)  # whoever runs the installation is rarely who made it
    target = SHIPPED / f"pdbus-{level}-{_source_digest(_LEVEL_FLAGS[level])[:16]}.so"
    _compile(target, level, compiler)
    return target


def _compile(target: Path, level: Level, compiler: str) -> None:
    """Unless another process has just done so. The file appears whole or not at all."""
    command = [compiler, *_FLAGS, *_LEVEL_FLAGS[level], str(_SOURCES / "forward.cpp")]
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(target.parent):
            if _sound(target):
                return
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                made = Path(scratch) / target.name
                _run([*command, "-o", str(made)])
                with made.open("ab") as file:
                    file.write(hashlib.sha256(made.read_bytes()).digest())  # a loader ignores what follows a library
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(made, target)
    except OSError as error:
        raise NativeUnavailable(f"no library could be written to {target.parent}: {error}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Whoever holds it compiles, for at most _COMPILE_TIMEOUT_S; it ends with its process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _sound(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except OSError:  # not there, or not for this user
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _source_digest(level_flags: list[str]) -> str:
    digest = hashlib.sha256(" ".join([*_FLAGS, *level_flags]).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise NativeUnavailable(f"{command[0]} failed: {error.stderr[-400:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} failed: {error}") from error
    return done.stdout
