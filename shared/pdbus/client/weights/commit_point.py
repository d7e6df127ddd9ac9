"""The commit point: one append to the change log, compare-and-set on its sequence (DESIGN.md section 4).

It is the only moment at which a version comes to exist. Before it nothing is visible; after it nothing can be taken
back but by another entry.
"""

from __future__ import annotations

import logging

from pdbus.bus.bus import Bus
from pdbus.context import Deadline
from pdbus.errors import Conflict, DeadlineExceeded, PdbusError, Unavailable
from pdbus.messages.changelog import Abort, Commit, LogEntry
from pdbus.peers.history import HistoryFollower
from pdbus.subjects import CHANGELOG

log = logging.getLogger(__name__)

_ABORT_S = 10.0
_LONGEST_REASON = 200


async def append_commit(bus: Bus, model: str, follower: HistoryFollower, commit: Commit, deadline: Deadline) -> int:
    """Appends the commit and returns its sequence. What became of an append whose answer got lost, the log tells; also
    after the deadline: then it is aborted, and whichever of the two came first counts.

    Raises Conflict where its line has moved, naming the winner, or where it was aborted; DeadlineExceeded where it was
    not committed, or (its message says so) where even that can't be found out."""
    try:
        return await _append(bus, model, follower, commit, deadline)
    except DeadlineExceeded as error:
        await append_abort(bus, model, commit.tx, error.message)
        try:
            await follower.caught_up(Deadline.after(_ABORT_S))
        except DeadlineExceeded:
            raise DeadlineExceeded(f"the change log does not answer: look there for update {commit.tx}") from error
        if follower.history.outcome(commit) != "committed":
            raise
        return follower.history.roots[commit.root].at.seq


async def _append(bus: Bus, model: str, follower: HistoryFollower, commit: Commit, deadline: Deadline) -> int:
    to, entry = CHANGELOG(model=model), LogEntry(commit=commit)
    while True:
        deadline.check("the change log could be written")
        await follower.caught_up(deadline)
        match follower.history.outcome(commit):
            case "committed":
                return follower.history.roots[commit.root].at.seq
            case "aborted":
                raise Conflict("the update was aborted: it took longer than it had said it would")
            case "conflict":
                head = follower.history.head(commit.ref)
                winner = head.hex()[:12] if head else "nothing"
                raise Conflict(f"{commit.ref or 'its parent'} has moved on to {winner}: begin again on top of that")
        try:
            expected, message_id = follower.seq, entry.message_id
            return await bus.logs.append(to, entry, expected_seq=expected, message_id=message_id, deadline=deadline)
        except (Conflict, Unavailable) as error:
            log.info("the commit looks at the log again: %s", error.message)


async def append_abort(bus: Bus, model: str, tx: str, reason: str) -> None:
    """Servers let go of what was staged once the log has this; where it can't be written, at the deadline."""
    entry = LogEntry(abort=Abort(tx, reason[:_LONGEST_REASON]))
    deadline = Deadline.after(_ABORT_S)
    try:
        await bus.logs.append(CHANGELOG(model=model), entry, message_id=entry.message_id, deadline=deadline)
    except PdbusError as error:
        log.warning("the update %s is left to its deadline: %s", tx, error.message)
