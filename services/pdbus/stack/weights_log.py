"""`pdbus weights log`: the change log, for people."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from rich.table import Column, Table

from pdbus.bus.bus import Bus
from pdbus.errors import NotFound
from pdbus.messages.changelog import LogEntry
from pdbus.messages.common import Digest
from pdbus.stack.attach import Target, attached
from pdbus.stack.view import wide_console
from pdbus.subjects import CHANGELOG, CHECKPOINTS

_SHORT = 12


def show_log(target: Target, *, whole: bool = True) -> int:
    table = Table(*(Column(title, no_wrap=True) for title in ("seq", "when", "kind", "what")), "", box=None)
    found, first = asyncio.run(entries(target, whole=whole))
    for row in _rows(found):
        table.add_row(*row)
    if first:
        wide_console().print(f"entries up to {first} are left out: --all shows them")
    wide_console().print(table)
    return 0


async def entries(target: Target, *, whole: bool = True) -> tuple[list[tuple[int, int, LogEntry]], int]:
    """(sequence, wall-clock ns, entry) of the change log; and the last sequence that was left out: the older of the two
    checkpoints that are kept, unless the `whole` log is wanted."""
    found: list[tuple[int, int, LogEntry]] = []
    async with attached(target) as bus:
        to = CHANGELOG(model=target.model)
        last = await bus.logs.last_seq(to)
        first = 0 if whole else await _older_checkpoint(bus, target.model)
        async for record in bus.logs.between(to, first, last):
            found.append((record.seq, record.time_ns, record.entry))
    return found, first


async def _older_checkpoint(bus: Bus, model: str) -> int:
    try:
        older = await bus.logs.next(CHECKPOINTS(model=model), 0)
        born = (await bus.logs.state(CHANGELOG(model=model))).created
    except NotFound:
        return 0
    return older.entry.seq if older and older.entry.log == born else 0


def describe(entry: LogEntry) -> tuple[str, str, str]:
    """(kind, what, who and why) of one entry, for people."""
    if commit := entry.commit:
        taken = f", {commit.sealed.branch} up to {commit.sealed.upto}" if commit.sealed else ""
        what = f"{commit.author}: {commit.message} ({len(commit.layers)} layers{taken})"
        return "commit", short(commit.root), what
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
    return "unknown", "", ""


def _rows(found: list[tuple[int, int, LogEntry]]) -> Iterator[tuple[str, ...]]:
    if not found:
        raise NotFound("the change log is empty")
    for seq, time_ns, entry in found:
        yield (str(seq), when(time_ns), *describe(entry))


def when(time_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ns / 1e9))


def short(root: Digest | None) -> str:
    return root.hex()[:_SHORT] if root else "nothing"
