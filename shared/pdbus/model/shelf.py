"""Packed weights on disk, piece by piece, so that they are made once on a host: read into memory, or mapped.

    magic 8 | SHA-256 of all that follows | header bytes u32 | header | arrays, each at a multiple of 64

The header is msgpack: numbers that describe the piece, and (name, dtype, shape, offset) of each array. A piece is found
by what it was made from and by the code that made it (`Shelf.key`), and used only if its checksum holds.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import msgpack
import numpy as np

from pdbus import canonical
from pdbus.caching.cache_folder import CacheFolder
from pdbus.messages.common import Digest
from pdbus.native.build import kernel_version

Array: TypeAlias = "np.ndarray[Any, Any]"
Numbers: TypeAlias = Mapping[str, Sequence[int]]

_MAGIC = b"pdpack1\n"
_ALIGN = 64
_CHECKED_BYTES = 1 << 20
_MAKERS = ("quantize.py", "native_layer.py", "rotate.py", "hadamard.py", "../native/pack.py", "../native/pack_runs.py")


class FileMemory:
    """A file in memory: in the system's page cache, and in this process's memory as far as it has been touched."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.nbytes = len(self.memory)

    def ahead(self) -> None:
        """The system begins to read it from disk, as far as it isn't in memory."""
        self.memory.madvise(mmap.MADV_WILLNEED)

    def drop(self) -> None:
        """It no longer counts as this process's memory. Whoever reads it finds it again."""
        self.memory.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Arrays, and numbers that describe them."""

    numbers: Numbers
    arrays: Mapping[str, Array]
    mapped: FileMemory | None = None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class Shelf:
    """The pieces of one precision. `form`: names it."""

    def __init__(self, folder: CacheFolder, form: str) -> None:
        self._folder = folder
        self._form = f"{form}/{_code()}"

    def key(self, *made_from: canonical.Value) -> Digest:
        return canonical.digest(["pdbus-packed-1", self._form, list(made_from)])

    def read(self, key: Digest, name: str) -> Piece | None:
        """In memory of its own; None where it isn't there."""
        path = self._folder.find("packed", key)
        if path is None:
            return None
        content = np.empty(path.stat().st_size, np.uint8)
        if not self._folder.read("packed", key, (name, -1), content.data):
            return None
        if not _is_sound(content.data):
            self._folder.damaged("packed", key)
            return None
        return _piece(content.data, None)

    def map(self, key: Digest, name: str) -> Piece | None:
        """As the file that it is; None where it isn't there. Nothing of it is in this process's memory yet."""
        path = self._folder.find("packed", key)
        if path is None:
            return None
        try:
            mapped = FileMemory(path)
        except (OSError, ValueError):  # evicted meanwhile, or empty
            return None
        content = memoryview(mapped.memory)
        if not _is_sound(content):
            self._folder.damaged("packed", key)
            return None
        self._folder.used("packed", key, (name, -1))
        piece = _piece(content, mapped)
        mapped.drop()  # last: a touch of the header alone may bring in megabytes of what follows
        return piece

    def put(self, key: Digest, name: str, piece: Piece) -> bool:
        """False: the disk refuses."""
        content = _encoded(piece)
        return self._folder.write("packed", key, (name, -1), content.data)


@cache
def _code() -> str:
    """Changes with whatever could change a byte of what is packed."""
    here = Path(__file__).parent
    made_by = hashlib.sha256(b"".join((here / name).read_bytes() for name in _MAKERS)).hexdigest()
    return f"{kernel_version()}-{made_by[:16]}"


def _encoded(piece: Piece) -> Array:
    listed, at = [], 0
    for name, array in piece.arrays.items():
        listed.append([name, array.dtype.str, list(array.shape), at])
        at += -(-array.nbytes // _ALIGN) * _ALIGN
    header = msgpack.packb([{name: list(values) for name, values in piece.numbers.items()}, listed])
    start = _start(len(header))
    content = np.zeros(start + at, np.uint8)
    body = content[start:]
    for (_, _, _, offset), array in zip(listed, piece.arrays.values(), strict=True):
        body[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    content[40:44] = np.frombuffer(struct.pack("<I", len(header)), np.uint8)
    content[44 : 44 + len(header)] = np.frombuffer(header, np.uint8)
    content[:8] = np.frombuffer(_MAGIC, np.uint8)
    content[8:40] = np.frombuffer(hashlib.sha256(content[40:].data).digest(), np.uint8)
    return content


def _is_sound(content: memoryview) -> bool:
    if len(content) < 44 or content[:8] != _MAGIC:
        return False
    checksum = hashlib.sha256()
    for at in range(40, len(content), _CHECKED_BYTES):
        checksum.update(content[at : at + _CHECKED_BYTES])
    return checksum.digest() == content[8:40]


def _piece(content: memoryview, mapped: FileMemory | None) -> Piece:
    (size,) = struct.unpack_from("<I", content, 40)
    numbers, listed = msgpack.unpackb(content[44 : 44 + size])
    start = _start(size)
    arrays = {}
    for name, kind, shape, offset in listed:
        dtype = np.dtype(kind)
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(content, dtype, count, start + offset).reshape(shape)
    return Piece(numbers, arrays, mapped)


def _start(header: int) -> int:
    return -(-(44 + header) // _ALIGN) * _ALIGN
