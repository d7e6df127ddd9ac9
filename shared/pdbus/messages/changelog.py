"""The change log of a model: the one order of its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdbus.messages.common import Digest


@dataclass(frozen=True, slots=True)
class Commit:
    """Makes `root` exist. Its own sequence is its place in the log."""

    tx: str
    """The transaction; also the message id, so that an append retried after an unknown outcome counts once."""
    root: Digest
    parent: Digest | None
    author: str
    message: str
    layers: tuple[tuple[str, Digest], ...]
    """Layers whose digests differ from the parent's."""
    precision: str = "fp32"
    ref: str = "stable"
    """The line that it continues: its ref follows once the fleet has the root ready. Empty: the root only exists."""
    source: Digest | None = None
    """The version in fp32 that this one was converted from, into `precision`."""


@dataclass(frozen=True, slots=True)
class Abort:
    tx: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ref:
    """Moves a name to a root; None removes the name. Rollback is a Ref that names an old root.

    Not at once, unless `now`: the root becomes its line's head, and the name follows when workers have it ready."""

    name: str
    root: Digest | None
    author: str
    message: str = ""
    share: float | None = None
    """Of the sessions that name no ref, the part from 0 to 1 that this one takes. None: none, unless it is `stable`."""
    now: bool = True


@dataclass(frozen=True, slots=True)
class Forget:
    """These roots are gone at once, whatever the rollback window; those that a ref or a pending head names stay."""

    roots: tuple[Digest, ...]
    author: str


@dataclass(frozen=True, slots=True)
class Member:
    """A param-server joins or leaves for good. A restart is neither."""

    server: str
    action: Literal["join", "leave"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state after all entries before it, so that a late joiner need not replay them."""

    refs: tuple[tuple[str, Digest], ...]
    roots: tuple[Digest, ...]
    members: tuple[str, ...]
    heads: tuple[tuple[str, Digest], ...] = ()
    """Of lines whose head its ref doesn't name."""
    shares: tuple[tuple[str, float], ...] = ()
    conversions: tuple[Convert, ...] = ()
    """Those that follow a line."""
    derived: tuple[tuple[Digest, str, Digest], ...] = ()
    """(version in fp32, precision, the version that was made of it)."""


@dataclass(frozen=True, slots=True)
class Convert:
    """Asks the param-servers for versions in another precision: of `root`, once; or of every head of `line`, until
    `ref` is removed. Each becomes a commit, and the head of the line `ref`; of no line where that is empty."""

    precision: str
    ref: str
    author: str
    root: Digest | None = None
    line: str = ""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Exactly one of these is set."""

    commit: Commit | None = None
    abort: Abort | None = None
    ref: Ref | None = None
    member: Member | None = None
    forget: Forget | None = None
    checkpoint: Checkpoint | None = None
    convert: Convert | None = None

    @property
    def message_id(self) -> str | None:
        """JetStream's de-duplication id, where a repeated append must count once."""
        if self.commit:
            return f"commit-{self.commit.tx}"
        return f"abort-{self.abort.tx}" if self.abort else None
