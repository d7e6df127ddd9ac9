"""The commit point: one append to the change log, compare-and-set on its sequence (DESIGN.md section 4).

It is the only moment at which a version comes to exist. Before it nothing is visible; after it nothing can be taken
back but by another entry.
"""

from __future__ import annotations

import logging

from pdbus.bus.bus import Bus
from pdbus.context import Deadline
from pdbus.errors import Conflict, DeadlineExceeded, PdbusError, Unavailable, WireError
from pdbus.messages.changelog import NOTHING_CHANGED, Abort, Commit, Ended, LogEntry
from pdbus.peers.history import HistoryFollower
from pdbus.subjects import CHANGELOG
from pdbus.weights.history import History

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
        return _seq(follower.history.end_of(commit.tx))


async def _append(bus: Bus, model: str, follower: HistoryFollower, commit: Commit, deadline: Deadline) -> int:
    to, entry = CHANGELOG(model=model), LogEntry(commit=commit)
    while True:
        deadline.check("the change log could be written")
        await follower.caught_up(deadline)
        match follower.history.outcome(commit):
            case "committed" | "aborted":
                return _seq(follower.history.end_of(commit.tx))
            case "conflict":
                raise _conflict(follower.history, commit)
        try:
            expected, message_id = follower.seq, entry.message_id
            return await bus.logs.append(to, entry, expected_seq=expected, message_id=message_id, deadline=deadline)
        except (Conflict, Unavailable) as error:
            log.info("the commit looks at the log again: %s", error.message)


class Ahead(Conflict):
    """The line has moved on meanwhile: the same update may be made again on top of its head."""


def _conflict(history: History, commit: Commit) -> Conflict:
    sealed = commit.sealed
    if sealed and history.sealed_upto(sealed.branch, sealed.log) != sealed.after:
        return Conflict(f"the branch {sealed.branch} was sealed by another meanwhile: what it took is in a version")
    head = history.head(commit.ref)
    winner = head.hex()[:12] if head else "nothing"
    return Ahead(f"{commit.ref or 'its parent'} has moved on to {winner}: begin again on top of that")


def _seq(ended: Ended | None) -> int:
    """Of the commit. Raises what the abort says."""
    if ended and ended.root:
        return ended.seq
    raise abort_error(ended)


def abort_error(ended: Ended | None) -> PdbusError:
    """What every process raises whose update was aborted."""
    if ended is None or ended.code == NOTHING_CHANGED:
        return Conflict("the update has ended")
    return WireError(ended.code, ended.reason).to_exception()


async def append_abort(bus: Bus, model: str, tx: str, reason: str, code: str = Conflict.code) -> None:
    """Servers let go of what was staged once the log has this; where it can't be written, at the deadline."""
    entry = LogEntry(abort=Abort(tx, reason[:_LONGEST_REASON], code))
    deadline = Deadline.after(_ABORT_S)
    try:
        await bus.logs.append(CHANGELOG(model=model), entry, message_id=entry.message_id, deadline=deadline)
    except PdbusError as error:
        log.warning("the update %s is left to its deadline: %s", tx, error.message)
