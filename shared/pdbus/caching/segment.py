"""Files of a disk tier: records one after the other, appended and read, never changed but for a mark of deletion.

    record = head | tenant | material | value | padding to 64 bytes

A head names all that an index needs, with a checksum of itself and one of the value, so that the index is rebuilt by
walking the heads: at the first one that is not sound (a crash in mid-write) the file ends. What the value's bytes are
is checked whenever they are read.

Writing goes by `pwrite` (a full disk is an error, not a signal), reading by a map of the file. A segment that was
removed stays readable for those who still have it.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pdbus.checksum import crc32
from pdbus.errors import Corrupt

_HEAD = struct.Struct("<4sBBHIIIdd32s32sII")
_MAGIC = b"PDK1"
_MARK_AT = 4
"""Of the byte that tells a deletion; no checksum covers it."""
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Head:
    """What a record tells of itself. Times are wall-clock seconds."""

    key: bytes
    root: bytes
    tenant: str
    material: bytes
    value_bytes: int
    size: int
    """Bytes of the value as its reader gets it."""
    packed: bool
    stored_s: float
    expires_s: float
    checksum: int = 0
    """CRC-32 of the value as stored."""

    @property
    def value_at(self) -> int:
        """Where the value begins in its record."""
        return _HEAD.size + len(self.tenant.encode()) + len(self.material)

    @property
    def record_bytes(self) -> int:
        return -(-(self.value_at + self.value_bytes) // _ALIGN) * _ALIGN


class Segment:
    """One file. `limit`: its largest size. Reading and writing may happen in any thread, the rest in its owner's."""

    def __init__(self, path: Path, limit: int, used: int = 0) -> None:
        self.path = path
        self.limit = limit
        self.used = used
        """Bytes given out to records."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._closer = weakref.finalize(self, os.close, self._fd)  # a write under way must never meet another file
        os.ftruncate(self._fd, limit)
        self._map = mmap.mmap(self._fd, limit, access=mmap.ACCESS_READ)
        self._content = memoryview(self._map)

    @classmethod
    def open(cls, path: Path) -> tuple[Segment, list[tuple[int, Head]]] | None:
        """A segment of a former life, to be read only, and (offset, head) of its records that were not deleted. None
        where there are none."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return None
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                walked = list(_walk(content))
        end = max((offset + head.record_bytes for offset, head, _ in walked), default=0)
        found = [(offset, head) for offset, head, deleted in walked if not deleted]
        return (cls(path, end, end), found) if found else None

    def reserve(self, size: int) -> int | None:
        """The offset of a place for a record of `size` bytes; None where there is no room for it."""
        if self.used + size > self.limit:
            return None
        offset, self.used = self.used, self.used + size
        return offset

    def seal(self) -> None:
        """Nothing more is appended: gives back the room that was not used. Only once no write is under way."""
        os.ftruncate(self._fd, self.used)
        self.limit = self.used

    def write(self, offset: int, head: Head, value: bytes) -> Head:
        """Fills a reserved place; returns the head with the value's checksum. Raises OSError."""
        head = replace(head, checksum=crc32(value))
        head_bytes = _packed(head)
        padding = bytes(head.record_bytes - len(head_bytes) - len(value))
        if os.pwritev(self._fd, [head_bytes, value, padding], offset) != head.record_bytes:
            raise OSError(f"{self.path} took only a part of a record")
        return head

    def read(self, offset: int, head: Head) -> memoryview:
        """The value of the record at `offset`, checked. Raises Corrupt."""
        start = offset + head.value_at
        value = self._content[start : start + head.value_bytes]
        if len(value) != head.value_bytes or crc32(value) != head.checksum:
            raise Corrupt(f"a record in {self.path} is damaged")
        return value

    def will_need(self, offset: int, head: Head) -> None:
        """Asks the system to bring a record from the disk meanwhile."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_WILLNEED"):
            self._map.madvise(mmap.MADV_WILLNEED, start, offset + head.record_bytes - start)

    def mark_deleted(self, offset: int) -> None:
        """So that the record is not found again after a restart. Raises OSError."""
        os.pwrite(self._fd, b"\x01", offset + _MARK_AT)

    def remove(self) -> None:
        """Deletes the file. Who still reads or writes it does so in vain, and harms nothing."""
        self.path.unlink(missing_ok=True)


def _packed(head: Head) -> bytes:
    """The record up to its value."""
    tenant = head.tenant.encode()

    def fixed(own_checksum: int) -> bytes:
        return _HEAD.pack(
            _MAGIC, 0, head.packed, len(tenant), len(head.material), head.value_bytes, head.size,
            head.stored_s, head.expires_s, head.key, head.root, head.checksum, own_checksum,
        )  # fmt: skip

    return fixed(crc32(fixed(0) + tenant + head.material)) + tenant + head.material


def _walk(content: mmap.mmap) -> Iterator[tuple[int, Head, bool]]:
    """(offset, head, deleted) of every record up to the first that is not sound."""
    offset = 0
    while offset + _HEAD.size <= len(content):
        magic, mark, packed, tenant_bytes, material_bytes, value_bytes, size, *rest = _HEAD.unpack_from(content, offset)
        stored_s, expires_s, key, root, value_sum, own_sum = rest
        at = offset + _HEAD.size
        tenant = content[at : at + tenant_bytes]
        material = content[at + tenant_bytes : at + tenant_bytes + material_bytes]
        fixed = bytearray(content[offset:at])
        fixed[_MARK_AT] = 0
        fixed[-4:] = bytes(4)
        if magic != _MAGIC or crc32(bytes(fixed) + tenant + material) != own_sum:
            return
        try:
            named = tenant.decode()
        except UnicodeDecodeError:
            return
        head = Head(key, root, named, material, value_bytes, size, bool(packed), stored_s, expires_s, value_sum)
        if offset + head.record_bytes > len(content):
            return
        yield offset, head, mark != 0
        offset += head.record_bytes
