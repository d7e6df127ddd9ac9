"""One entry of a node's disk, as the index knows it."""

from __future__ import annotations

from dataclasses import dataclass

from pdbus.caching.entry import Entry
from pdbus.caching.segment import Head, Segment
from pdbus.caching.store import TOMBSTONE_S

RECORD_BYTES = 1200
"""What an entry costs in memory: its head, its places in the indexes. A test measures it."""
_LONGEST_S = TOMBSTONE_S / 2
"""Shorter than the log of invalidations goes back, so that an entry never outlives the news of its deletion."""


@dataclass(eq=False, slots=True)
class DiskEntry:
    """A record and where it lies. Fields as in Entry; times on the monotonic clock of this life."""

    segment: Segment
    offset: int
    head: Head
    root: bytes
    """The one that it belongs to now; it was written under that of the head."""
    stored_s: float
    expires_s: float
    hits: int = 0
    void: bool = False
    """Deleted."""

    @classmethod
    def found(cls, segment: Segment, offset: int, head: Head, wall_s: float) -> DiskEntry:
        """A record of a former life. `wall_s`: wall-clock seconds when the monotonic clock of this one shows 0."""
        return cls(segment, offset, head, head.root, head.stored_s - wall_s, head.expires_s - wall_s)

    @property
    def key(self) -> bytes:
        return self.head.key

    @property
    def size(self) -> int:
        return self.head.size

    @property
    def material(self) -> bytes:
        return self.head.material

    def with_value(self, value: bytes) -> Entry:
        """As memory holds it. `value`: as stored."""
        return Entry(
            kind="kv",
            key=self.key,
            root=self.root,
            tenant=self.head.tenant,
            material=self.material,
            value=value,
            size=self.size,
            stored_s=self.stored_s,
            expires_s=self.expires_s,
            packed=self.head.packed,
        )


def head_of(entry: Entry, wall_s: float) -> Head:
    """What the record of a page tells of it, but for the checksum."""
    return Head(
        entry.key,
        entry.root,
        entry.tenant,
        entry.material,
        len(entry.value),
        entry.size,
        entry.packed,
        entry.stored_s + wall_s,
        min(entry.expires_s, entry.stored_s + _LONGEST_S) + wall_s,
    )
