"""What processes that change weights together tell each other, and what goes into staging branches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdbus.messages.common import Digest


@dataclass(frozen=True, slots=True)
class PartJoin:
    """Part `part` of `of` wants to take part in an update, which it takes to be this one."""

    part: int
    of: int
    incarnation: str
    """Random for each try of the process: a later one under the same id is not this one."""
    ref: str
    message: str
    parent: Digest | None


@dataclass(frozen=True, slots=True)
class PartTerms:
    """What all parts of the update have in common."""

    tx: str
    """The transaction in the change log and at the servers: a new one for each update, whatever its shared id."""
    parent: Digest
    deadline_ns: int
    """Wall clock."""


@dataclass(frozen=True, slots=True)
class PartTensor:
    """A tensor that a part has staged. Blocks that aren't listed are the parent's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[tuple[int, Digest], ...]


@dataclass(frozen=True, slots=True)
class PartStaged:
    """Some of what a part has staged, durable at its owners; with the `last` of them all of it."""

    tx: str
    part: int
    incarnation: str
    tensors: tuple[PartTensor, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class PartTaken:
    tx: str


@dataclass(frozen=True, slots=True)
class BranchEntry:
    """Values for some elements of a tensor, set or added. Little-endian: `at` u64, `values` fp32."""

    tensor: str
    how: Literal["set", "add"]
    where: Literal["run", "rows", "elements"]
    """run: elements from the one index in `at` on. rows: whole rows, by index. elements: by index when flattened."""
    at: bytes
    values: bytes
