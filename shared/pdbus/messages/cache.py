"""What cache nodes receive. A value is small (inline) or travels by Bulk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdbus.messages.common import Digest

Kind = Literal["result", "kv", "feature", "model"]

INLINE_BYTES = 64 << 10
"""Values up to this size travel inside the message, so that a token behind it on the connection does not wait."""


@dataclass(frozen=True, slots=True)
class CacheGet:
    """Several keys of one node. Values above the inline limit go to the bulk stream."""

    kind: Kind
    keys: tuple[Digest, ...]
    root: Digest
    receiver: str = ""
    """Bulk address of the reader; empty: inline values only, of larger ones the size is told."""
    stream: str = ""
    max_age_ms: int | None = None
    parts: int = 0
    """Above 0: the keys are those of a prefix, of use up to the first that is absent; and their values may be cut into
    this many equal parts, to travel in whatever pieces make good frames (`CacheHead`)."""


@dataclass(frozen=True, slots=True)
class CacheFound:
    """What is known of one key. `size` -1: absent; `generation` is then the fence that a fill must bring back."""

    size: int
    age_ms: int = 0
    generation: int = 0
    material: bytes = b""
    """What the key was made from, to be compared by the reader: equal digests are not enough."""
    value: bytes | None = None
    """None with size >= 0: it comes by Bulk, if the reader named a stream."""
    disk: bool = False
    """It was not in memory any more."""


@dataclass(frozen=True, slots=True)
class CacheGetReply:
    node: str
    incarnation: str
    found: tuple[CacheFound, ...]
    """One for each key, in order."""
    generation: int = 0
    """The fence that a fill of any of them must bring back, also of one that was found."""


@dataclass(frozen=True, slots=True)
class CachePut:
    """One entry. `value` None: the node answers with a stream that takes it by Bulk.

    Refused with `conflict` when it is fenced: its root is tombstoned, or (named entries) the node's incarnation or the
    name's generation is not the one that the miss told."""

    kind: Kind
    key: Digest
    root: Digest
    tenant: str
    material: bytes
    ttl_ms: int
    size: int
    value: bytes | None = None
    name: str = ""
    """A named entry's name; empty for content-keyed ones."""
    incarnation: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class CachePutReply:
    stored: bool
    """False: already there, or the node chose not to keep it."""
    address: str = ""
    stream: str = ""
    """Send the value to this bulk stream."""


@dataclass(frozen=True, slots=True)
class CacheDelete:
    """By key, by root, or by name; whichever are given."""

    keys: tuple[Digest, ...] = ()
    root: Digest = b""
    name: str = ""


@dataclass(frozen=True, slots=True)
class CacheDeleteReply:
    deleted: int


@dataclass(frozen=True, slots=True)
class CacheScan:
    """Entries in key order after `after`, for audits and repair."""

    after: Digest = b""
    limit: int = 256
    root: Digest = b""
    """Only entries of this root; empty: all."""


@dataclass(frozen=True, slots=True)
class ScannedEntry:
    kind: Kind
    key: Digest
    root: Digest
    tenant: str
    size: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class CacheScanReply:
    entries: tuple[ScannedEntry, ...]
    more: bool
