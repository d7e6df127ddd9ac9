"""`pdbus weights log`: the change log, for people."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from rich.table import Column, Table

from pdbus.errors import NotFound
from pdbus.messages.changelog import LogEntry
from pdbus.messages.common import Digest
from pdbus.stack.attach import Target, attached
from pdbus.stack.view import wide_console
from pdbus.subjects import CHANGELOG

_LOG_S = 5.0
_SHORT = 12


def show_log(target: Target) -> int:
    table = Table(*(Column(title, no_wrap=True) for title in ("seq", "when", "kind", "what")), "", box=None)
    for row in _rows(asyncio.run(entries(target))):
        table.add_row(*row)
    wide_console().print(table)
    return 0


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


def describe(entry: LogEntry) -> tuple[str, str, str]:
    """(kind, what, who and why) of one entry, for people."""
    if commit := entry.commit:
        return "commit", short(commit.root), f"{commit.author}: {commit.message} ({len(commit.layers)} layers)"
    if ref := entry.ref:
        share = "" if ref.share is None else f" for {ref.share:.0%}"
        why = ": ".join(part for part in (ref.author, ref.message) if part)
        return "ref", f"{ref.name} → {short(ref.root)}{share}", why
    if abort := entry.abort:
        return "abort", abort.tx, abort.reason
    if member := entry.member:
        return "member", member.server, f"{member.action}s"
    if forget := entry.forget:
        return "forget", ", ".join(map(short, forget.roots)), forget.author
    if convert := entry.convert:
        what = f"{convert.precision} of {convert.line or short(convert.root)} as {convert.ref or 'a version'}"
        return "convert", what, f"{convert.author}: {'each head' if convert.line else 'once'}"
    return "checkpoint", "", ""


def _rows(found: list[tuple[int, int, LogEntry]]) -> Iterator[tuple[str, ...]]:
    if not found:
        raise NotFound("the change log is empty")
    for seq, time_ns, entry in found:
        yield (str(seq), when(time_ns), *describe(entry))


def when(time_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns / 1e9))


def short(root: Digest | None) -> str:
    return root.hex()[:_SHORT] if root else "nothing"
