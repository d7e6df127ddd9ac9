"""What param-servers receive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """A block that an update needs."""

    digest: Digest
    """Of the block itself, whatever travels."""
    size: int
    """Bytes of the block."""
    form: Literal["whole", "sparse", "low_rank"] = "whole"
    """Of what travels (weights/delta.py)."""
    base: Digest | None = None
    """Of the block that a delta applies to."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks of the transaction `tx` are coming. Nothing is visible of them before a commit names them."""

    tx: str
    blocks: tuple[StagedBlock, ...]
    deadline_ns: int
    """Wall clock: a transaction that isn't committed by then may be aborted by anyone."""


@dataclass(frozen=True, slots=True)
class StageReply:
    """Send the blocks that are not `have`, in order, to the bulk stream `stream` at `address`."""

    server: str
    address: str
    stream: str
    have: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make all that was staged here for `tx` durable, and say what of `digests` is missing. May be repeated."""

    tx: str
    digests: tuple[Digest, ...]
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class PrepareReply:
    server: str
    missing: tuple[Digest, ...]
    """Not here: it never came, or its delta did not make it. To be sent whole."""


@dataclass(frozen=True, slots=True)
class HeatWanted:
    most: int
    """Blocks to be named at most, the hottest first; 2048 and less."""


@dataclass(frozen=True, slots=True)
class BlockHeat:
    """How often a block was sent to readers and changed by commits, whatever its content: sums that halve every
    `half_life_s`."""

    tensor: str
    index: int
    reads: float
    updates: float


@dataclass(frozen=True, slots=True)
class TensorHeat:
    """The sums over its blocks, as far as they are counted."""

    tensor: str
    blocks: int
    reads: float
    updates: float


@dataclass(frozen=True, slots=True)
class HeatReply:
    server: str
    half_life_s: float
    tensors: tuple[TensorHeat, ...]
    blocks: tuple[BlockHeat, ...]
