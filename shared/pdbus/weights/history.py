"""A model's change log, folded: which roots exist, which names point where, who the param-servers are.

Pure: entries come in by `apply`, in the order of the log, each once. What an entry can't mean is ignored, for every
reader alike: a ref to a root that no commit made, a commit after its own abort.

A line is a ref and the commits that continue it. Its head is the last of those commits, or what the ref was moved to
since; while the two differ the head is pending: workers get ready for it, and the ref follows.

A checkpoint is a History at one sequence. Who begins with one knows of all that lives, for ever after, what a reader of
the whole log knows. What left its last ref longer than LIVE_S ago is dead: no entry brings it back, for neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

from pdbus.context import LONGEST_DEADLINE_S
from pdbus.errors import InvalidRequest, NotFound
from pdbus.messages.changelog import Checkpoint, Commit, Ended, KeptVersion, LogEntry, Ref, Sealed
from pdbus.messages.common import Digest
from pdbus.weights.conversions import Conversions, Due

RETENTION_S = LONGEST_DEADLINE_S + 600.0
"""How long a root stays fetchable after its last ref left: the longest deadline, and the rollback window."""
LIVE_S = RETENTION_S + LONGEST_DEADLINE_S
"""How long after that a ref may still be moved to it: an update that rests on it may be open until then."""
_GONE_NS = 86_400 * 1_000_000_000
_ENDED_KEPT_S = 2 * LONGEST_DEADLINE_S
_SEALED_KEPT = 4096
"""Branches whose last seal is known. What was sealed is purged, so that of older ones nothing is there any more."""
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
    """Its first commit."""
    commit: Commit | None
    """None where this reader began later, with a checkpoint that had no room for it: the log has it at that place."""
    left: Moment | None = None
    """When it left its last ref, or, never named, was followed by a newer head. None: it is wanted."""


class History:
    """Mutable; only `apply` changes it. The views that it returns are snapshots."""

    def __init__(self) -> None:
        self.seq = 0
        """The last entry applied."""
        self.time_ns = 0
        """When that was appended."""
        self.entries = 0
        """So far."""
        self.forgotten = 0
        """Roots that were forgotten so far."""
        self._refs: dict[str, Digest] = {}
        self._heads: dict[str, Digest] = {}
        self._shares: dict[str, float] = {}
        self._versions: dict[Digest, Version] = {}
        self._members: set[str] = set()
        self._ended: dict[str, Ended] = {}
        self._sealed: dict[str, Sealed] = {}
        self._gone: dict[Digest, Version] = {}
        self.conversions = Conversions()
        """Versions in other precisions: which are asked for, and what was made of what."""

    @classmethod
    def restored(cls, checkpoint: Checkpoint) -> Self:
        """As it was after the entry that the checkpoint is of."""
        self = cls()
        self.seq, self.time_ns, self.entries = checkpoint.seq, checkpoint.time_ns, checkpoint.entries
        self.forgotten = checkpoint.forgotten
        self._refs, self._heads = dict(checkpoint.refs), dict(checkpoint.heads)
        self._shares, self._members = dict(checkpoint.shares), set(checkpoint.members)
        self._ended = {one.tx: one for one in checkpoint.ended}
        self._sealed = {one.branch: one for one in checkpoint.sealed}
        self._versions = {kept.root: _restored(kept) for kept in checkpoint.versions}
        self._gone = {kept.root: _restored(kept) for kept in checkpoint.gone}
        self.conversions = Conversions.restored(checkpoint)
        return self

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
    def heads(self) -> dict[str, Digest]:
        """By line."""
        return dict(self._heads)

    @property
    def gone(self) -> dict[Digest, Version]:
        """Roots that were forgotten within a day, `left` then: what was made from them is still to be deleted."""
        return dict(self._gone)

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

    @property
    def live(self) -> frozenset[Digest]:
        """The roots that a ref names, or may still be moved to."""
        return frozenset(root for root in self._versions if self._lives(root))

    def derived(self, root: Digest, precision: str) -> Digest | None:
        """The version in that precision that was made of `root`, where there is one."""
        found = self.conversions.made.get((root, precision))
        return found if found is not None and self._lives(found) else None

    @property
    def due_conversions(self) -> tuple[Due, ...]:
        """The versions in other precisions that are asked for and not there yet, or not where they shall be."""
        return self.conversions.due(self._heads, self.live)

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
        if ended := self._ended.get(commit.tx):
            return "committed" if ended.root else "aborted"
        if commit.sealed and self.sealed_upto(commit.sealed.branch, commit.sealed.log) != commit.sealed.after:
            return "conflict"
        if not commit.ref:
            return "open" if commit.parent is None or self._lives(commit.parent) else "conflict"
        return "open" if self.head(commit.ref) == commit.parent else "conflict"

    @property
    def ended(self) -> tuple[Ended, ...]:
        """Of the transactions whose end is not long ago, how they ended; in the order of that."""
        return tuple(self._ended.values())

    def end_of(self, tx: str) -> Ended | None:
        """How the transaction ended; None while neither a commit nor an abort of it is in the log."""
        return self._ended.get(tx)

    def is_open(self, tx: str) -> bool:
        return tx not in self._ended

    @property
    def sealed(self) -> tuple[Sealed, ...]:
        """Of each branch, what was sealed last."""
        return tuple(self._sealed.values())

    def sealed_upto(self, branch: str, log: str) -> int:
        """The last entry of the branch's log, of that birth, which is part of a version; 0 where none is."""
        last = self._sealed.get(branch)
        return last.upto if last and last.log == log else 0

    def apply(self, seq: int, time_ns: int, entry: LogEntry) -> None:
        """Folds in the next entry. Raises ValueError for one that is not behind the last."""
        if seq <= self.seq:
            raise ValueError(f"entry {seq} comes after {self.seq}")
        self.seq, self.time_ns = seq, time_ns
        self.entries += 1
        now = Moment(seq, time_ns)
        before = set(self.wanted)
        if entry.commit:
            self._commit(entry.commit, now)
        elif (abort := entry.abort) and abort.tx not in self._ended:
            self._end(Ended(abort.tx, seq, time_ns, None, abort.reason, abort.code))
        elif entry.ref:
            self._move(entry.ref)
        elif entry.member:
            (self._members.add if entry.member.action == "join" else self._members.discard)(entry.member.server)
        elif entry.forget:
            for root in (set(entry.forget.roots) - before) & self._versions.keys():
                self.forgotten += self._lives(root)
                self._gone[root] = replace(self._versions.pop(root), left=now)
                self.conversions.ended(root)
            self._gone = {r: v for r, v in self._gone.items() if v.left and now.time_ns - v.left.time_ns < _GONE_NS}
        elif (convert := entry.convert) and (convert.root is None or self._lives(convert.root)):
            self.conversions.ask(convert)
        after = set(self.wanted)
        for root in before - after:
            self._versions[root] = replace(self._versions[root], left=now)
        for root in after - before:
            self._versions[root] = replace(self._versions[root], left=None)

    def _commit(self, commit: Commit, now: Moment) -> None:
        """A root committed again keeps its first lineage, and heads the line once more."""
        if commit.tx in self._ended:
            return
        self._end(Ended(commit.tx, now.seq, now.time_ns, commit.root))
        self._gone.pop(commit.root, None)
        if not self._lives(commit.root):
            self._versions.pop(commit.root, None)
            self._versions[commit.root] = Version(commit.root, now, commit, None if commit.ref else now)
            self.conversions.ended(commit.root)
        self.conversions.committed(commit)
        if commit.ref:
            self._heads[commit.ref] = commit.root
        if commit.sealed:
            self._sealed.pop(commit.sealed.branch, None)
            self._sealed[commit.sealed.branch] = commit.sealed
            if len(self._sealed) > _SEALED_KEPT:
                del self._sealed[next(iter(self._sealed))]

    def _end(self, ended: Ended) -> None:
        self._ended[ended.tx] = ended
        while (first := next(iter(self._ended.values()))).time_ns < ended.time_ns - int(_ENDED_KEPT_S * 1e9):
            del self._ended[first.tx]

    def _lives(self, root: Digest) -> bool:
        version = self._versions.get(root)
        return bool(version and (version.left is None or version.left.time_ns >= self.time_ns - int(LIVE_S * 1e9)))

    def _move(self, ref: Ref) -> None:
        """A removed ref takes its line with it."""
        if ref.root is not None and not self._lives(ref.root):
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

    def _starting_with(self, prefix: str) -> Iterator[Digest]:
        return (root for root in self._versions if root.hex().startswith(prefix))


def _restored(kept: KeptVersion) -> Version:
    return Version(kept.root, Moment(*kept.at), kept.commit, Moment(*kept.left) if kept.left else None)
