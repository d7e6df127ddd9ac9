"""From a version, or from any answer's `system_fingerprint`, to the commit that made it. The log keeps all of them."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from pdbus.bus.logs import Logs
from pdbus.context import Deadline
from pdbus.errors import DeadlineExceeded, InvalidRequest, NotFound
from pdbus.messages.changelog import Commit, Forget, LogEntry
from pdbus.messages.common import Digest
from pdbus.subjects import ToEvent
from pdbus.weights.history import History
from pdbus.weights.log_state import RETENTION_S, Moment, Version

FINGERPRINT = "root-"
"""An answer's `system_fingerprint` is this and the first digits of its root."""
_SEARCH_S = 120.0
_PREFIX = re.compile(r"[0-9a-f]{6,64}")


@dataclass(frozen=True, slots=True)
class Lineage:
    """What is known of a version that exists, or once did."""

    root: Digest
    at: Moment
    """Of its commit."""
    commit: Commit
    refs: tuple[str, ...] = ()
    """That name it now."""
    waiting: tuple[str, ...] = ()
    """Lines whose head it is, while their ref doesn't follow yet."""
    left: Moment | None = None
    """When it left its last ref, by a move or a rollback."""
    kept: bool = False
    """It can still be fetched, compared and moved back to."""
    given_up: Moment | None = None
    given_up_by: str = ""


async def lineage_of(logs: Logs, to: ToEvent[LogEntry], version: Version, history: History) -> Lineage:
    """Of a version that the history knows. Raises NotFound where the log has lost its commit, Unavailable."""
    commit = version.commit
    if commit is None:
        record = await logs.next(to, version.at.seq - 1)
        commit = record.entry.commit if record and record.seq == version.at.seq else None
    if commit is None:
        raise NotFound(f"the change log has no commit of version {version.root.hex()[:12]}")
    named = tuple(ref for ref, root in history.refs.items() if root == version.root)
    waiting = tuple(line for line, head in history.pending.items() if head == version.root)
    kept = version.root in history.retained(time.time_ns(), RETENTION_S)
    return Lineage(version.root, version.at, commit, named, waiting, version.left, kept)


async def find_lineage(logs: Logs, to: ToEvent[LogEntry], prefix: str, upto: int) -> Lineage:
    """Of a version that no history knows any more: read from the log. Raises as `History.resolve`, DeadlineExceeded."""
    found: dict[Digest, tuple[Moment, Commit]] = {}
    forgotten: dict[Digest, tuple[Moment, Forget]] = {}
    if not _PREFIX.fullmatch(prefix):
        raise NotFound(f"there is no version or ref {prefix!r}")
    deadline = Deadline.after(_SEARCH_S)
    async for record in logs.between(to, 0, upto):
        entry, at = record.entry, Moment(record.seq, record.time_ns)
        if deadline.passed:
            raise DeadlineExceeded(f"{prefix} was not found in the change log up to entry {at.seq}")
        if entry.commit and entry.commit.root.hex().startswith(prefix):
            found.setdefault(entry.commit.root, (at, entry.commit))
        for root in entry.forget.roots if entry.forget else ():
            if root in found:
                assert entry.forget
                forgotten[root] = (at, entry.forget)
    if len(found) != 1:
        problem = "the beginning of several versions; give more digits" if found else "no version or ref"
        raise (InvalidRequest if found else NotFound)(f"{prefix!r} is {problem}")
    ((root, (at, commit)),) = found.items()
    gone = forgotten.get(root)
    return Lineage(root, at, commit, given_up=gone[0] if gone else None, given_up_by=gone[1].author if gone else "")
