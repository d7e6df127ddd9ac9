"""A model's change log, folded: which roots exist, which names point where, who the param-servers are.

Pure: entries come in by `apply`, in the order of the log, each once. What an entry can't mean is ignored, for every
reader alike: a ref to a root that no commit made, a commit after its own abort.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pdbus.errors import InvalidRequest, NotFound
from pdbus.messages.changelog import Checkpoint, Commit, LogEntry, Ref
from pdbus.messages.common import Digest

_ROOT_PREFIX = re.compile(r"[0-9a-f]{6,64}")


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in the log."""

    seq: int
    time_ns: int
    """Wall clock, as the log's server stamped the entry."""


@dataclass(frozen=True, slots=True)
class Version:
    """A root that exists."""

    root: Digest
    at: Moment
    """Its first commit; or the checkpoint entry that lists it, where the log begins later."""
    commit: Commit | None
    left: Moment | None = None
    """When it left its last ref, or, never named, was followed by a newer commit. None: it is wanted."""


class History:
    """Mutable; only `apply` changes it. The views that it returns are snapshots."""

    def __init__(self) -> None:
        self.seq = 0
        """The last entry applied."""
        self.newest: Digest | None = None
        """Root of the last commit."""
        self.pending: Digest | None = None
        """The newest root, until a ref has named it since its commit."""
        self._refs: dict[str, Digest] = {}
        self._versions: dict[Digest, Version] = {}
        self._members: set[str] = set()
        self._committed: set[str] = set()
        self._aborted: set[str] = set()

    @property
    def refs(self) -> dict[str, Digest]:
        return dict(self._refs)

    @property
    def roots(self) -> dict[Digest, Version]:
        """Every root that exists, in the order of their first commits."""
        return dict(self._versions)

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(sorted(self._members))

    @property
    def wanted(self) -> tuple[Digest, ...]:
        """The roots that workers hold: what refs name, and the newest commit until it gets its ref. Without repeats."""
        pending = (self.pending,) if self.pending else ()
        return tuple(dict.fromkeys((*(self._refs[name] for name in sorted(self._refs)), *pending)))

    def retained(self, now_ns: int, keep_s: float) -> tuple[Digest, ...]:
        """The roots that must stay fetchable: wanted ones, and those that left less than `keep_s` ago."""
        since_ns = now_ns - int(keep_s * 1e9)
        return tuple(v.root for v in self._versions.values() if v.left is None or v.left.time_ns >= since_ns)

    def resolve(self, name: str) -> Digest:
        """The root of a ref, or of 6 and more hex digits of a root. Raises NotFound, or InvalidRequest if ambiguous."""
        if name in self._refs:
            return self._refs[name]
        found = list(self._starting_with(name)) if _ROOT_PREFIX.fullmatch(name) else []
        if len(found) > 1:
            raise InvalidRequest(f"{name!r} is the beginning of {len(found)} versions; give more digits")
        if not found:
            raise NotFound(f"there is no version or ref {name!r}")
        return found[0]

    def outcome(self, commit: Commit) -> Literal["committed", "aborted", "conflict", "open"]:
        """What became of a commit whose append failed its compare, or whose answer got lost.

        committed: it is in the log. aborted: its abort is, so stop. conflict: another commit came after its parent, and
        `newest` is the winner. open: only other entries came in between; append it again at the new sequence."""
        if commit.tx in self._committed:
            return "committed"
        if commit.tx in self._aborted:
            return "aborted"
        return "open" if self.newest == commit.parent else "conflict"

    def apply(self, seq: int, time_ns: int, entry: LogEntry) -> None:
        """Folds in the next entry. Raises ValueError for one that is not behind the last."""
        if seq <= self.seq:
            raise ValueError(f"entry {seq} comes after {self.seq}")
        self.seq = seq
        now = Moment(seq, time_ns)
        before = set(self.wanted)
        if entry.commit:
            self._commit(entry.commit, now)
        elif entry.abort and entry.abort.tx not in self._committed:
            self._aborted.add(entry.abort.tx)
        elif entry.ref:
            self._move(entry.ref)
        elif entry.member:
            (self._members.add if entry.member.action == "join" else self._members.discard)(entry.member.server)
        elif entry.checkpoint:
            self._restore(entry.checkpoint, now)
        after = set(self.wanted)
        for root in before - after:
            self._versions[root] = replace(self._versions[root], left=now)
        for root in after - before:
            self._versions[root] = replace(self._versions[root], left=None)

    def _commit(self, commit: Commit, now: Moment) -> None:
        """A root committed again keeps its first lineage and is the newest once more."""
        if commit.tx in self._aborted or commit.tx in self._committed:
            return
        self._committed.add(commit.tx)
        self._versions.setdefault(commit.root, Version(commit.root, now, commit))
        self.newest = commit.root
        self.pending = None if commit.root in self._refs.values() else commit.root

    def _move(self, ref: Ref) -> None:
        if ref.root is None:
            self._refs.pop(ref.name, None)
        elif ref.root in self._versions:
            self._refs[ref.name] = ref.root
            if self.pending == ref.root:
                self.pending = None

    def _restore(self, checkpoint: Checkpoint, now: Moment) -> None:
        """Only a reader that joined late learns from it: to all others it says what they know."""
        if self._versions or self._members:
            return
        for root in checkpoint.roots:
            self._versions[root] = Version(root, now, None, left=now)
        self._refs = {name: root for name, root in checkpoint.refs if root in self._versions}
        self._members = set(checkpoint.members)
        self.newest = checkpoint.roots[-1] if checkpoint.roots else None

    def _starting_with(self, prefix: str) -> Iterator[Digest]:
        return (root for root in self._versions if root.hex().startswith(prefix))
