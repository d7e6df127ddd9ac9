"""A model's change log, folded: which roots exist, which names point where, who the param-servers are.

Pure: entries come in by `apply`, in the order of the log, each once. What an entry can't mean is ignored, for every
reader alike: a ref to a root that no commit made, a commit after its own abort.

A line is a ref and the commits that continue it. Its head is the last of those commits, or what the ref was moved to
since; while the two differ the head is pending: workers get ready for it, and the ref follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pdbus.context import LONGEST_DEADLINE_S
from pdbus.errors import InvalidRequest, NotFound
from pdbus.messages.changelog import Checkpoint, Commit, LogEntry, Ref
from pdbus.messages.common import Digest
from pdbus.weights.conversions import Conversions, Due

RETENTION_S = LONGEST_DEADLINE_S + 600.0
"""How long a root stays fetchable after its last ref left: the longest deadline, and the rollback window."""
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
    """When it left its last ref, or, never named, was followed by a newer head. None: it is wanted."""


class History:
    """Mutable; only `apply` changes it. The views that it returns are snapshots."""

    def __init__(self) -> None:
        self.seq = 0
        """The last entry applied."""
        self.forgotten = 0
        """Roots that were forgotten so far."""
        self._refs: dict[str, Digest] = {}
        self._heads: dict[str, Digest] = {}
        self._shares: dict[str, float] = {}
        self._versions: dict[Digest, Version] = {}
        self._members: set[str] = set()
        self._committed: set[str] = set()
        self._aborted: set[str] = set()
        self.conversions = Conversions()
        """Versions in other precisions: which are asked for, and what was made of what."""

    @property
    def refs(self) -> dict[str, Digest]:
        return dict(self._refs)

    @property
    def shares(self) -> dict[str, float]:
        """By ref, the part of the sessions naming no ref that it takes."""
        return dict(self._shares)

    def head(self, line: str) -> Digest | None:
        """What the next commit on that line has to have for its parent."""
        return self._heads.get(line)

    @property
    def pending(self) -> dict[str, Digest]:
        """By line, the head that its ref does not name yet."""
        return {line: head for line, head in self._heads.items() if self._refs.get(line) != head}

    @property
    def roots(self) -> dict[Digest, Version]:
        """Every root that exists, in the order of their first commits."""
        return dict(self._versions)

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(sorted(self._members))

    @property
    def wanted(self) -> tuple[Digest, ...]:
        """The roots that workers hold: what refs name, and the pending heads. Without repeats."""
        pending = self.pending
        named = (*(self._refs[name] for name in sorted(self._refs)), *(pending[line] for line in sorted(pending)))
        return tuple(dict.fromkeys(named))

    def retained(self, now_ns: int, keep_s: float) -> tuple[Digest, ...]:
        """The roots that must stay fetchable: wanted ones, and those that left less than `keep_s` ago."""
        since_ns = now_ns - int(keep_s * 1e9)
        return tuple(v.root for v in self._versions.values() if v.left is None or v.left.time_ns >= since_ns)

    def derived(self, root: Digest, precision: str) -> Digest | None:
        """The version in that precision that was made of `root`, where there is one."""
        found = self.conversions.made.get((root, precision))
        return found if found in self._versions else None

    @property
    def due_conversions(self) -> tuple[Due, ...]:
        """The versions in other precisions that are asked for and not there yet, or not where they shall be."""
        return self.conversions.due(self._heads, self._versions)

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

        committed: it is in the log. aborted: its abort is, so stop. conflict: its line has another head than its parent
        now, the winner. open: only other entries came in between; append it again at the new sequence."""
        if commit.tx in self._committed:
            return "committed"
        if commit.tx in self._aborted:
            return "aborted"
        if not commit.ref:
            return "open" if commit.parent is None or commit.parent in self._versions else "conflict"
        return "open" if self.head(commit.ref) == commit.parent else "conflict"

    def is_open(self, tx: str) -> bool:
        """Neither a commit nor an abort of the transaction is in the log."""
        return tx not in self._committed and tx not in self._aborted

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
        elif entry.forget:
            for root in (set(entry.forget.roots) - before) & self._versions.keys():
                del self._versions[root]
                self.forgotten += 1
        elif entry.convert:
            self.conversions.ask(entry.convert)
        elif entry.checkpoint:
            self._restore(entry.checkpoint, now)
        after = set(self.wanted)
        for root in before - after:
            self._versions[root] = replace(self._versions[root], left=now)
        for root in after - before:
            self._versions[root] = replace(self._versions[root], left=None)

    def _commit(self, commit: Commit, now: Moment) -> None:
        """A root committed again keeps its first lineage, and heads the line once more."""
        if commit.tx in self._aborted or commit.tx in self._committed:
            return
        self._committed.add(commit.tx)
        self.conversions.committed(commit)
        left = None if commit.ref else now
        self._versions.setdefault(commit.root, Version(commit.root, now, commit, left))
        if commit.ref:
            self._heads[commit.ref] = commit.root

    def _move(self, ref: Ref) -> None:
        """A removed ref takes its line with it."""
        if ref.root is not None and ref.root not in self._versions:
            return
        self._shares.pop(ref.name, None)
        self.conversions.moved(ref)
        if ref.root is None:
            self._refs.pop(ref.name, None)
            self._heads.pop(ref.name, None)
            return
        self._heads[ref.name] = ref.root
        if ref.now:
            self._refs[ref.name] = ref.root
        if ref.share is not None:
            self._shares[ref.name] = ref.share

    def _restore(self, checkpoint: Checkpoint, now: Moment) -> None:
        """Only a reader that joined late learns from it: to all others it says what they know."""
        if self._versions or self._members:
            return
        for root in checkpoint.roots:
            self._versions[root] = Version(root, now, None, left=now)
        self._refs = {name: root for name, root in checkpoint.refs if root in self._versions}
        self._heads = self._refs | {line: root for line, root in checkpoint.heads if root in self._versions}
        self._shares = {name: share for name, share in checkpoint.shares if name in self._refs}
        self._members = set(checkpoint.members)
        self.conversions.restore(checkpoint)

    def _starting_with(self, prefix: str) -> Iterator[Digest]:
        return (root for root in self._versions if root.hex().startswith(prefix))
