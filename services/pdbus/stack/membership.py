"""Param-servers that this data folder no longer has leave the model's log, so that no shard waits for them."""

from __future__ import annotations

import re
from pathlib import Path

from pdbus.bus.bus import Bus
from pdbus.context import Deadline
from pdbus.errors import Conflict
from pdbus.messages.changelog import LogEntry, Member
from pdbus.peers.history import HistoryFollower
from pdbus.subjects import CHANGELOG

_OURS = re.compile(r"param-server-\d+")
_LOG_S = 10.0


def left_behind(model_folder: Path, started: set[str]) -> set[str]:
    """Ids of param-servers that an earlier run had on this folder and this one has not."""
    if not model_folder.exists():
        return set()
    return {entry.name for entry in model_folder.iterdir() if _OURS.fullmatch(entry.name)} - started


async def retire(bus: Bus, model: str, gone: set[str]) -> None:
    """Appends that `gone` left for good, as far as the log has them as members. Raises DeadlineExceeded."""
    deadline = Deadline.after(_LOG_S)
    to = CHANGELOG(model=model)
    async with HistoryFollower(bus, model) as follower:
        while True:
            await follower.caught_up(deadline)
            members = sorted(gone.intersection(follower.history.members))
            if not members:
                return
            deadline.check("the param-servers that are gone were taken off the log")
            entry = LogEntry(member=Member(members[0], "leave"))
            try:
                await bus.logs.append(to, entry, expected_seq=follower.seq, message_id=None)
            except Conflict:
                continue  # a service that starts wrote at the same time
