"""What a model's change log comes to, up to one of its entries: which roots exist, and which names point where.

Read-only: History (history.py) folds the entries in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pdbus.context import LONGEST_DEADLINE_S
from pdbus.errors import InvalidRequest, NotFound
from pdbus.messages.changelog import Commit, Ended, Sealed
from pdbus.messages.common import Digest
from pdbus.weights.conversions import Conversions, Due

RETENTION_S = LONGEST_DEADLINE_S + 600.0
"""How long a root stays fetchable after its last ref left: the longest deadline, and the rollback window."""
LIVE_S = RETENTION_S + LONGEST_DEADLINE_S
"""How long after that a ref may still be moved to it: an update that rests on it may be open until then."""
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


class LogState:
    """Its views are snapshots."""

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

    def is_due(self, root: Digest, precision: str) -> bool:
        """Whether a version in that precision is still to be made of `root`, or to become a head."""
        return any((due.root, due.precision) == (root, precision) for due in self.due_conversions)

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

    def _lives(self, root: Digest) -> bool:
        version = self._versions.get(root)
        return bool(version and (version.left is None or version.left.time_ns >= self.time_ns - int(LIVE_S * 1e9)))

    def _starting_with(self, prefix: str) -> Iterator[Digest]:
        return (root for root in self._versions if root.hex().startswith(prefix))
