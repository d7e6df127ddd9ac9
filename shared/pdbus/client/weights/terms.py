"""What an update says of itself, and what it comes to."""

from __future__ import annotations

import getpass
from dataclasses import dataclass, field

from pdbus.messages.changelog import Sealed
from pdbus.messages.common import Digest


@dataclass(frozen=True, slots=True)
class Committed:
    """A version that exists."""

    root: Digest
    seq: int
    """Of its commit in the change log."""
    changed_blocks: int = field(compare=False)
    """By this process."""
    sent_bytes: int = field(compare=False)
    """Of blocks, as they travelled from this process to all their owners."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What an update says of itself."""

    tx: str
    ref: str
    message: str
    author: str
    parent: Digest | None = None
    """None: the head of the line."""
    sealed: Sealed | None = None
    """What it takes from a staging branch."""


def me() -> str:
    """Who acts, where the caller doesn't say."""
    try:
        return getpass.getuser()
    except OSError:  # a container's user may have no name
        return "somebody"
