"""What has been deleted so far: the log of invalidations, folded. And what follows from it and the change log.

Pure; times are wall-clock nanoseconds, passed in. The two logs are the whole truth: reminders in the work queue only
say when to look, so that one too many, or one that comes twice, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pdbus.messages.common import Digest
from pdbus.messages.invalidator import DueDelete
from pdbus.messages.workers import Invalidated
from pdbus.weights.history import History
from pdbus.weights.log_state import Version

NS = 1_000_000_000
HORIZON_S = 12 * 3600
"""Roots that left longer ago need no reminder: the log of invalidations, which would tell whether they were deleted, is
kept for a day, and no cache entry lives for half of that."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """How far the double delete of a root has come since it left its last ref."""

    cause: int
    """Change-log sequence of the entry by which it left."""
    first_ns: int
    second: bool = False


@dataclass(frozen=True, slots=True)
class Buried:
    """A root of which nodes take no fills."""

    seq: int
    """Of its last delete."""
    since_ns: int
    """When its first one was logged."""


class Deletions:
    """The fold for one model. Mutable; only `apply` changes it."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._deleted: dict[Digest, Deleted] = {}
        self._buried: dict[Digest, Buried] = {}
        """Of whichever model: nodes know roots only."""

    def apply(self, seq: int, time_ns: int, entry: Invalidated) -> None:
        if entry.action == "restore":
            self._buried.pop(entry.root, None)
        elif entry.action == "delete":
            known_buried = self._buried.get(entry.root)
            self._buried[entry.root] = Buried(seq, known_buried.since_ns if known_buried else time_ns)
            if entry.model == self.model:
                known = self._deleted.get(entry.root)
                if known is None or known.cause != entry.cause:
                    known = Deleted(entry.cause, time_ns)
                self._deleted[entry.root] = replace(known, second=known.second or entry.second)

    def wrongly_buried(self, history: History) -> Iterator[tuple[Digest, int]]:
        """Roots that are live but take no fills, with the sequence of the delete that a `restore` has to undo."""
        roots = history.roots
        for root, buried in self._buried.items():
            if root in roots and roots[root].left is None:
                yield root, buried.seq

    def buried(self, root: Digest) -> Buried | None:
        """Since when no cache may have anything made from the root; None while it may."""
        return self._buried.get(root)

    def next_step(self, version: Version, window_s: float, longest_s: float) -> DueDelete | None:
        """The delete that a root needs next; None while it is live, and once it was deleted twice."""
        if version.left is None:
            return None
        cause = version.left.seq
        deleted = self._deleted.get(version.root)
        if deleted is None or deleted.cause != cause:
            due_ns = version.left.time_ns + int(window_s * NS)
            return DueDelete(self.model, version.root, due_ns, second=False, cause=cause)
        if not deleted.second:
            due_ns = deleted.first_ns + int(longest_s * NS)
            return DueDelete(self.model, version.root, due_ns, second=True, cause=cause)
        return None

    def pending(self, history: History, window_s: float, longest_s: float, now_ns: int) -> list[DueDelete]:
        """Every delete that is still to come, for which there should be a reminder."""
        steps = [self.next_step(version, window_s, longest_s) for version in history.roots.values()]
        steps += [self.next_step(version, 0.0, longest_s) for version in history.gone.values()]  # for good
        return [step for step in steps if step and step.due_ns > now_ns - HORIZON_S * NS]

    def still_wanted(self, reminder: DueDelete, history: History) -> bool:
        """Whether a reminder's delete is to be done: the root is still without a ref, for the same reason, and that
        step is not done. A first delete that is done but not settled is done again, until its second is reminded of."""
        version = history.roots.get(reminder.root) or history.gone.get(reminder.root)
        if version is None or version.left is None or version.left.seq != reminder.cause:
            return False
        deleted = self._deleted.get(reminder.root)
        return not (deleted and deleted.cause == reminder.cause and deleted.second)
