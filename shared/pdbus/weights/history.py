"""A model's change log, folded: which roots exist, which names point where, who the param-servers are.

Pure: entries come in by `apply`, in the order of the log, each once. What an entry can't mean is ignored, for every
reader alike: a ref to a root that no commit made, a commit after its own abort.

A line is a ref and the commits that continue it. Its head is the last of those commits, or what the ref was moved to
since; while the two differ the head is pending: workers get ready for it, and the ref follows.

A checkpoint is a History at one sequence. Who begins with one knows of all that lives, for ever after, what a reader of
the whole log knows. What left its last ref longer than LIVE_S ago is dead: no entry brings it back, for neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Self

from pdbus.context import LONGEST_DEADLINE_S
from pdbus.messages.changelog import Checkpoint, Commit, Ended, KeptVersion, LogEntry, Ref
from pdbus.weights.conversions import Conversions
from pdbus.weights.log_state import LogState, Moment, Version

_GONE_NS = 86_400 * 1_000_000_000
_ENDED_KEPT_S = 2 * LONGEST_DEADLINE_S
_SEALED_KEPT = 4096
"""Branches whose last seal is known. What was sealed is purged, so that of older ones nothing is there any more."""


class History(LogState):
    """Mutable; only `apply` changes it."""

    @classmethod
    def restored(cls, checkpoint: Checkpoint) -> Self:
        """As it was after the entry that the checkpoint is of."""
        self = cls()
        self.seq, self.time_ns, self.entries = checkpoint.seq, checkpoint.time_ns, checkpoint.entries
        self.forgotten = checkpoint.forgotten
        self._shares, self._members = dict(checkpoint.shares), set(checkpoint.members)
        self._ended = {one.tx: one for one in checkpoint.ended}
        self._sealed = {one.branch: one for one in checkpoint.sealed}
        self._versions = {kept.root: _restored(kept) for kept in checkpoint.versions}
        self._refs = {name: root for name, root in checkpoint.refs if root in self._versions}
        self._heads = {name: root for name, root in checkpoint.heads if root in self._versions}
        self._gone = {kept.root: _restored(kept) for kept in checkpoint.gone}
        self.conversions = Conversions.restored(checkpoint)
        return self

    def outcome(self, commit: Commit) -> Literal["committed", "aborted", "conflict", "open"]:
        """What became of a commit whose append failed its compare, or whose answer got lost.

        committed: it is in the log. aborted: its abort is, so stop. conflict: its line has another head than its parent
        now, the winner; or what it was converted from is no more. open: only other entries came in between; append it
        again at the new sequence."""
        if ended := self._ended.get(commit.tx):
            return "committed" if ended.root else "aborted"
        if commit.sealed and self.sealed_upto(commit.sealed.branch, commit.sealed.log) != commit.sealed.after:
            return "conflict"
        if commit.source and not self._lives(commit.source):
            return "conflict"
        if not commit.ref:
            return "open" if commit.parent is None or self._lives(commit.parent) else "conflict"
        return "open" if self.head(commit.ref) == commit.parent else "conflict"

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


def _restored(kept: KeptVersion) -> Version:
    return Version(kept.root, Moment(*kept.at), kept.commit, Moment(*kept.left) if kept.left else None)
