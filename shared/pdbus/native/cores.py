"""The ledger of a machine's cores: a small memory that all its engines map, so that each knows who else computes now.

Layout (src/cores.h): a header of 64 bytes, then a cell of 64 bytes for each engine. A cell belongs to whoever holds the
lock on its bytes of the file, which the system gives back when that process ends, however it ends. The header also
holds a random id, by which engines know that they share their cores; the kernels have no use for it.

Best in memory, as `ledger()` makes it: a mapped page of a file on disk is written back now and then, and an engine that
writes to it just then waits for the disk.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdbus.errors import Conflict, InvalidRequest

_CELL_BYTES = 64
_CELLS = 63
"""A page of memory with the header."""
_SIZE = _CELL_BYTES * (1 + _CELLS)
_MAGIC = b"pdcores1"
_HEADER = struct.Struct("=8sii16s")
"""Magic, cores, cells from the first on that were ever taken, id."""
_USED_AT = 12
_USED = struct.Struct("=i")
_LOCK = struct.Struct("hhqqi0q")
"""struct flock: type, whence, start, length, pid."""


@contextmanager
def ledger(cores: int) -> Iterator[int | None]:
    """A ledger that divides `cores` among the engines; yields its file descriptor, to be inherited by their processes.

    None where the system has no such memory: it has no native engine then either."""
    if sys.platform != "linux":
        yield None
        return
    fd = os.memfd_create("pdbus-cores")
    try:
        write_ledger(fd, cores)
        yield fd
    finally:
        os.close(fd)


def write_ledger(fd: int, cores: int) -> None:
    """Makes an empty ledger of the file `fd`."""
    os.ftruncate(fd, 0)
    os.ftruncate(fd, _SIZE)
    os.pwrite(fd, _HEADER.pack(_MAGIC, cores, 0, os.urandom(16)), 0)


@dataclass(frozen=True, slots=True)
class SharedCores:
    """What a ledger divides."""

    cores: int
    id: str
    """The same for all whose ledger it is, and for nobody else."""


def shared_cores(path: Path | None) -> SharedCores | None:
    """None without a ledger. Raises InvalidRequest where `path` is none."""
    if path is None:
        return None
    fd = _open(path)
    try:
        return _read_header(fd, path)
    finally:
        os.close(fd)


class Cell:
    """One engine's cell in the ledger `path`, held until `close` or the end of the process."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequest where `path` is no ledger, Conflict where all of its cells are taken."""
        self._fd = _open(path)
        try:
            self.cores = _read_header(self._fd, path).cores
            self._memory = mmap.mmap(self._fd, _SIZE)
            self.number = self._claim(path)
        except BaseException:
            os.close(self._fd)
            raise
        self._first = ctypes.c_char.from_buffer(self._memory)

    @property
    def address(self) -> int:
        """Of the ledger in this process's memory."""
        return ctypes.addressof(self._first)

    def close(self) -> None:
        """Nothing may compute with it any more."""
        del self._first
        self._memory[self._start(self.number) : self._start(self.number) + 8] = bytes(8)
        self._memory.close()
        os.close(self._fd)

    def _claim(self, path: Path) -> int:
        _lock(self._fd, fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, 0)
        try:
            for number in range(_CELLS):
                try:
                    _lock(self._fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, self._start(number))
                except BlockingIOError:
                    continue
                self._memory[self._start(number) : self._start(number) + 8] = bytes(8)
                (used,) = _USED.unpack_from(self._memory, _USED_AT)
                _USED.pack_into(self._memory, _USED_AT, max(used, number + 1))
                return number
        finally:
            _lock(self._fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0)
        raise Conflict(f"all {_CELLS} cells of {path} are taken")

    @staticmethod
    def _start(number: int) -> int:
        return _CELL_BYTES * (1 + number)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"the ledger of cores {path} can't be opened: {error.strerror}") from error


def _read_header(fd: int, path: Path) -> SharedCores:
    magic, cores, _, id = _HEADER.unpack(os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
    if magic != _MAGIC or cores < 1 or os.fstat(fd).st_size != _SIZE:
        raise InvalidRequest(f"{path} is no ledger of cores")
    return SharedCores(cores, id.hex())


def _lock(fd: int, command: int, kind: int, start: int) -> None:
    """On one cell, or the header: of the open file, not of the process, so that two engines of one process differ."""
    fcntl.fcntl(fd, command, _LOCK.pack(kind, os.SEEK_SET, start, _CELL_BYTES, 0))
