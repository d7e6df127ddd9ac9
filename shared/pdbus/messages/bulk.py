"""The bulk protocol: credit, and the headers that travel inside frames. The frame's layout is bus/bulk_frames.py's."""

from __future__ import annotations

from dataclasses import dataclass

from pdbus.errors import WireError
from pdbus.messages.common import Digest


@dataclass(frozen=True, slots=True)
class Credit:
    """Receiver to sender, on the sender's credit subject."""

    stream: str
    received: int
    """Frames taken in order so far; the sender may be at most the window beyond it."""
    window: int = 8
    """Frames; smaller while the receiver has many streams open."""
    resend: bool = False
    """A gap was seen, or nothing came for a while: send again from frame `received` on."""
    error: WireError | None = None
    """The receiver gave the stream up; nothing more is wanted."""


@dataclass(frozen=True, slots=True)
class BlockHead:
    """One block in answer to BlocksRequest; `index` counts in its digests."""

    index: int


@dataclass(frozen=True, slots=True)
class StagedHead:
    """One block of an update; `index` counts in Stage's blocks."""

    index: int
    unpacked: int = 0
    """Bytes of what the body, compressed with zstd, holds; 0: it is not compressed."""


KV_FINAL = -1


@dataclass(frozen=True, slots=True)
class KvHead:
    """KV of `tokens` prompt tokens from `start` on, as whole pages in the pool's own bytes; layer after layer, where
    it is of several."""

    attempt: int
    root: Digest
    layer: int
    """KV_FINAL: the body is an encoded `decode.KvFinal`, and nothing follows."""
    start: int
    """First token; a multiple of the page size."""
    tokens: int
    layers: int = 1
    """From `layer` on."""


@dataclass(frozen=True, slots=True)
class CacheHead:
    """Cache values, or a piece of them; `index` counts in the request's keys.

    A piece: of `count` values from `index` on, one after the other, their `parts` parts from `part` on."""

    index: int
    count: int = 1
    part: int = 0
    parts: int = 0
    """0: the values are whole."""
