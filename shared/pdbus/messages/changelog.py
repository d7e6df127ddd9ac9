"""The change log of a model: the one order of its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdbus.messages.common import Digest

NOTHING_CHANGED = "nothing_changed"
"""The code of an abort that ends an update which changed nothing: its version exists already."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """A stretch of a staging branch that went into a version: its entries after one sequence, up to another."""

    branch: str
    log: str
    """The branch log's date of birth: the sequences of one that was lost mean nothing."""
    after: int
    upto: int


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
    sealed: Sealed | None = None
    """What it took from a staging branch."""
    source: Digest | None = None
    """The version in fp32 that this one was converted from, into `precision`."""
    checkpoint: Digest | None = None
    """The root that a param-server's checkpoint has by itself, where this one has its line's sparse tables besides."""


@dataclass(frozen=True, slots=True)
class Abort:
    tx: str
    reason: str
    code: str = "conflict"
    """Of the error (errors.py) that every process of the update raises; `NOTHING_CHANGED`: of none."""


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
class KeptVersion:
    """A version in a checkpoint. Its moments are (sequence, wall-clock ns) of entries."""

    root: Digest
    at: tuple[int, int]
    left: tuple[int, int] | None
    commit: Commit | None = None
    """None where there was no room for it: the log has it, at the sequence of `at`."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a transaction ended: by a commit of `root`, or by an abort."""

    tx: str
    seq: int
    time_ns: int
    root: Digest | None
    reason: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state after the entry `seq` of the log, so that a late joiner need not replay what came before.

    It has a subject of its own, so that its newest is found without reading the log (CHECKPOINTS)."""

    log: str
    """The change log's date of birth: of one that was lost a checkpoint says nothing."""
    seq: int
    time_ns: int
    entries: int
    """Of this model, so far."""
    refs: tuple[tuple[str, Digest], ...]
    heads: tuple[tuple[str, Digest], ...]
    """By line."""
    shares: tuple[tuple[str, float], ...]
    members: tuple[str, ...]
    versions: tuple[KeptVersion, ...]
    """In the order of their first commits."""
    ended: tuple[Ended, ...]
    """The last transactions, in the order of their ends."""
    sealed: tuple[Sealed, ...]
    """Of each branch, what was sealed last."""
    forgotten: int
    gone: tuple[KeptVersion, ...] = ()
    """Forgotten within a day, the latest: what was made from them is still to be deleted."""
    conversions: tuple[Convert, ...] = ()
    """What is asked for once and not there yet; then those that follow a line."""
    derived: tuple[tuple[Digest, str, Digest], ...] = ()
    """(version in fp32, precision, the version that was made of it last), of those that live."""
    sources: tuple[tuple[Digest, Digest, str], ...] = ()
    """(version, what it was first made of, its precision), of those that live."""


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
    convert: Convert | None = None

    @property
    def message_id(self) -> str | None:
        """JetStream's de-duplication id, where a repeated append must count once."""
        if self.commit:
            return f"commit-{self.commit.tx}"
        return f"abort-{self.abort.tx}" if self.abort else None
