"""What param-servers receive."""

from __future__ import annotations

from dataclasses import dataclass

from pdbus.messages.common import Digest


@dataclass(frozen=True, slots=True)
class BlocksRequest:
    """Send these blocks of one shard to my bulk stream `stream` at `receiver`."""

    digests: tuple[Digest, ...]
    receiver: str
    """Bulk address of the reader."""
    stream: str


@dataclass(frozen=True, slots=True)
class BlocksReply:
    """What is coming, in the order asked for. `sizes`: bytes of each, -1 where this server lacks it."""

    server: str
    sizes: tuple[int, ...]
