"""Packs: the files that blocks lie in. A pack never changes once it is there.

    N.pack     the blocks, one after the other
    N.index    magic | pack bytes u64 | count u64 | count x (digest 32, offset u64, bytes u64) | SHA-256 of all before

Both are written under another name, synced and renamed, the pack first: an index without its pack can't come to be, and
a pack without index is what a crash left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from pdbus.errors import Corrupt
from pdbus.messages.common import Digest
from pdbus.param_server.disk import sync_folder, told

_MAGIC = b"pdbus-pack-1\n\0\0\0"
_HEAD = struct.Struct(">16sQQ")
_ENTRY = struct.Struct(">32sQQ")
_SUM_BYTES = 32


@dataclass(frozen=True, eq=False)
class Pack:
    """A pack, mapped into memory."""

    name: str
    """Of its file."""
    content: mmap.mmap | bytes
    """Empty packs are bytes: nothing can be mapped of them."""
    spans: Mapping[Digest, tuple[int, int]]
    """(offset, bytes) of each block."""

    def block(self, digest: Digest) -> memoryview:
        offset, size = self.spans[digest]
        return memoryview(self.content)[offset : offset + size]

    def unmap(self, digest: Digest) -> None:
        """The process lets go of the block's memory: it stays in the system's page cache, for as long as that has room,
        and can be read as before."""
        offset, size = self.spans[digest]
        first = offset - offset % mmap.PAGESIZE
        if isinstance(self.content, mmap.mmap):
            self.content.madvise(mmap.MADV_DONTNEED, first, offset + size - first)

    @classmethod
    def open(cls, path: Path) -> Pack:
        """Maps `path` (a .pack). Raises Corrupt where it and its index don't fit; contents are not read."""
        spans, size = _read_index(path.with_suffix(".index"))
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                raise Corrupt(f"{path} is not as long as its index says")
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        return cls(path.name, content, spans)


class PackWriter:
    """Writes one pack. Left without `finish`, it leaves nothing behind. `add` may be called from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spans: dict[Digest, tuple[int, int]] = {}
        self._size = 0
        self._lock = threading.Lock()
        with told(path.parent):
            self._file: BinaryIO = _new(path).open("wb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            _new(self._path).unlink()

    @property
    def name(self) -> str:
        return self._path.name

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, digest: Digest, content: memoryview) -> None:
        """Appends a block that isn't in this pack yet. Raises Unavailable where the disk refuses."""
        with self._lock, told(self._path.parent):
            if digest in self._spans:
                return
            rest = content
            while rest:
                rest = rest[self._file.write(rest) :]
            self._spans[digest] = (self._size, len(content))
            self._size += len(content)

    def finish(self) -> Pack:
        """Makes the pack durable and visible, and maps it. Raises Unavailable where the disk refuses."""
        with self._lock, told(self._path.parent):
            _publish(self._file, self._path)
            index = self._path.with_suffix(".index")
            with _new(index).open("wb") as file:
                file.write(_index(self._spans, self._size))
                file.flush()
                _publish(file, index)
            sync_folder(self._path.parent)
        return Pack.open(self._path)


def remove_leftovers(folder: Path) -> None:
    """Removes what a crash left of unfinished packs."""
    for path in folder.glob("*.new"):
        path.unlink()
    for path in folder.glob("*.pack"):
        if not path.with_suffix(".index").exists():
            path.unlink()


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _publish(file: BinaryIO, path: Path) -> None:
    os.fsync(file.fileno())
    _new(path).replace(path)


def _index(spans: Mapping[Digest, tuple[int, int]], size: int) -> bytes:
    entries = (_ENTRY.pack(digest, offset, length) for digest, (offset, length) in spans.items())
    body = _HEAD.pack(_MAGIC, size, len(spans)) + b"".join(entries)
    return body + hashlib.sha256(body).digest()


def _read_index(path: Path) -> tuple[dict[Digest, tuple[int, int]], int]:
    content = path.read_bytes()
    body = content[:-_SUM_BYTES]
    if len(body) < _HEAD.size or hashlib.sha256(body).digest() != content[-_SUM_BYTES:]:
        raise Corrupt(f"{path} is damaged")
    magic, size, count = _HEAD.unpack_from(body)
    if magic != _MAGIC or len(body) != _HEAD.size + count * _ENTRY.size:
        raise Corrupt(f"{path} is of another format")
    entries = _ENTRY.iter_unpack(body[_HEAD.size :])
    return {digest: (offset, length) for digest, offset, length in entries}, size
