"""`pdbus weights`: the change log, and moving a ref by hand."""

from __future__ import annotations

import asyncio
import getpass
import re
import time
from collections.abc import Iterator

from rich.table import Column, Table

from pdbus.context import Deadline
from pdbus.errors import Conflict, InvalidRequest, NotFound
from pdbus.messages.changelog import LogEntry, Ref
from pdbus.messages.common import Digest
from pdbus.peers.history import HistoryFollower
from pdbus.stack.attach import Target, attached
from pdbus.stack.view import wide_console
from pdbus.subjects import CHANGELOG

_LOG_S = 5.0
_SHORT = 12
_REF_NAME = re.compile(r"(?!root-|[0-9a-f]{6,64}$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Nothing that `MODEL@NAME` could take for a version."""


async def entries(target: Target) -> list[tuple[int, int, LogEntry]]:
    """(sequence, wall-clock ns, entry) of the whole change log."""
    found: list[tuple[int, int, LogEntry]] = []
    async with attached(target) as bus:
        to = CHANGELOG(model=target.model)
        last = await bus.logs.last_seq(to)
        if last == 0:
            return found
        async with asyncio.timeout(_LOG_S):
            async for record in bus.logs.follow(to):
                found.append((record.seq, record.time_ns, record.entry))
                if record.seq >= last:
                    break
    return found


async def move(target: Target, name: str, root: str) -> Digest:
    """Appends a ref entry that points `name` to the version that `root` names; returns it.

    Raises InvalidRequest for a name that no ref can have, NotFound for a version that does not exist, Conflict when
    somebody else wrote to the log meanwhile."""
    if not _REF_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} can't name a ref: 1 to 64 of A-Z a-z 0-9 . _ -, first a letter or digit, and unlike a version"
        )
    async with attached(target) as bus, HistoryFollower(bus, target.model) as follower:
        await follower.caught_up(Deadline.after(_LOG_S))
        history = follower.history
        found = history.resolve(root)
        if history.refs.get(name) == found:
            return found
        entry = LogEntry(ref=Ref(name, found, author=getpass.getuser(), message="moved by hand"))
        await bus.logs.append(CHANGELOG(model=target.model), entry, expected_seq=history.seq, message_id=None)
        return found


def describe(entry: LogEntry) -> tuple[str, str, str]:
    """(kind, what, who and why) of one entry, for people."""
    if commit := entry.commit:
        return "commit", _short(commit.root), f"{commit.author}: {commit.message} ({len(commit.layers)} layers)"
    if ref := entry.ref:
        return "ref", f"{ref.name} → {_short(ref.root)}", ": ".join(part for part in (ref.author, ref.message) if part)
    if abort := entry.abort:
        return "abort", abort.tx, abort.reason
    if member := entry.member:
        return "member", member.server, f"{member.action}s"
    return "checkpoint", "", ""


def show_log(target: Target) -> int:
    table = Table(*(Column(title, no_wrap=True) for title in ("seq", "when", "kind", "what")), "", box=None)
    for row in _rows(asyncio.run(entries(target))):
        table.add_row(*row)
    wide_console().print(table)
    return 0


def move_ref(target: Target, name: str, root: str) -> int:
    try:
        found = asyncio.run(move(target, name, root))
    except Conflict:
        raise Conflict(f"the change log of {target.model} moved at the same time: look at it, and try again") from None
    wide_console().print(f"{name} → {found.hex()}")
    return 0


def _rows(found: list[tuple[int, int, LogEntry]]) -> Iterator[tuple[str, ...]]:
    if not found:
        raise NotFound("the change log is empty")
    for seq, time_ns, entry in found:
        yield (str(seq), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns / 1e9)), *describe(entry))


def _short(root: Digest | None) -> str:
    return root.hex()[:_SHORT] if root else "nothing"
