"""What an update says of itself, and what it comes to."""

from __future__ import annotations

import getpass
import re
from dataclasses import dataclass, field

from pdbus.errors import InvalidRequest
from pdbus.messages.changelog import Sealed
from pdbus.messages.common import Digest

_REF_NAME = re.compile(r"(?!root-|[0-9a-f]{6,64}$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Nothing that `MODEL@NAME` could take for a version."""


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


def check_ref(name: str) -> None:
    """Raises InvalidRequest for what can't name a ref, or a branch."""
    if not _REF_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} can't name a ref: 1 to 64 of A-Z a-z 0-9 . _ -, first a letter or digit, and unlike a version",
            param="ref",
        )
