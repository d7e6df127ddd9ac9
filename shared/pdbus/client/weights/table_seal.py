"""Seals a sparse table: its log's entries become blocks of a new version. No row changes by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial

import numpy as np

from pdbus.bus.bus import Bus
from pdbus.client.weights.edits import Edit, NewBlock, edited, span, touched_by_rows, with_blocks
from pdbus.client.weights.update import Update
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, InvalidRequest, NotFound, Overloaded, PdbusError
from pdbus.messages.common import Digest
from pdbus.messages.rows import RowsUpdate
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.subjects import ToEvent
from pdbus.weights.blocks import Array
from pdbus.weights.log_state import RETENTION_S, Version
from pdbus.weights.row_overlay import RowOverlay
from pdbus.weights.tables import LINE, Table, decoded_update, layer_name, table

_BLOCKS_AT_ONCE = 64
_ANSWER_S = 10.0
_NONE = b""
_MOST_BYTES = 512 << 20
"""Of rows in memory: a log that holds more is sealed in several commits."""


async def seal(
    bus: Bus,
    begin: Callable[..., AbstractAsyncContextManager[Update]],
    reader: BlockReader,
    follower: HistoryFollower,
    to: ToEvent[RowsUpdate],
    name: str,
    message: str,
    timeout_s: float,
) -> Digest:
    """Raises as `RowTable.seal`."""
    deadline = Deadline.after(timeout_s)
    log, goal = await bus.logs.identity(to), await bus.logs.last_seq(to)
    while True:
        deadline.check(f"the table {name} was sealed")
        await follower.caught_up(deadline)
        head = follower.history.head(LINE)
        assert head  # there is a table
        about = table(await reader.manifest(head, RequestContext(deadline)), name)
        floor = about.seal.seq if about.seal.log == log else 0
        if floor >= goal:
            return head
        overlay = await _folded(bus, to, about, floor, goal, deadline)
        said = message or f"rows of table {name} up to {overlay.seq} of log {log}"
        try:
            async with begin(ref=LINE, parent=head, message=said, timeout_s=deadline.remaining_s) as update:
                new = await _sealed(update, reader, about, overlay, log, RequestContext(deadline))
                update.put_layer(layer_name(name), new.tensors)
                await update.commit()
        except Conflict:  # another seal, or an update: on top of that, if there is anything left to do
            continue


async def _folded(
    bus: Bus, to: ToEvent[RowsUpdate], about: Table, floor: int, goal: int, deadline: Deadline
) -> RowOverlay:
    """The log after `floor` up to `goal`, or as much of it as memory takes. Raises DeadlineExceeded, Unavailable."""
    overlay = RowOverlay(about.rows, about.width, floor, _MOST_BYTES)
    there = asyncio.Event()

    def take(seq: int, update: RowsUpdate | None) -> None:
        if overlay.seq >= goal:
            return
        try:
            if update is None:
                raise InvalidRequest("it can't be read")
            ids, values = decoded_update(update, about.rows, about.width)
        except InvalidRequest:  # every reader passes it over
            overlay.skip(seq)
        else:
            overlay.apply(seq, ids, values)
        if overlay.seq >= goal:
            there.set()

    async with bus.logs.tail(to, floor, take) as tail:
        waits = {asyncio.ensure_future(there.wait()), asyncio.ensure_future(tail.lost())}
        try:
            await asyncio.wait(waits, timeout=deadline.remaining_s, return_when=asyncio.FIRST_COMPLETED)
            if not there.is_set():
                why = await tail.lost() if tail.over else None
                if not isinstance(why, Overloaded):
                    deadline.check("the row log was read")
                    raise why or PdbusError("the row log was not read")
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
    return overlay


async def _sealed(
    update: Update, reader: BlockReader, about: Table, overlay: RowOverlay, log: str, ctx: RequestContext
) -> Table:
    """The table with the overlay in its blocks, which are durable then: some at a time, so that memory stays small."""
    ids = overlay.ids
    values = np.empty((len(ids), about.width), np.float32)
    overlay.read(ids, values)
    touched = touched_by_rows(about.tensor, ids)
    indices = sorted(touched)
    digests: dict[int, Digest] = {}
    for start in range(0, len(indices), _BLOCKS_AT_ONCE):
        group = indices[start : start + _BLOCKS_AT_ONCE]
        old = await reader.blocks(about.tensor, group, ctx)
        edits = {index: partial(_put, ids[touched[index]], values[touched[index]], about, index) for index in group}
        new = await asyncio.to_thread(_edited, about, old, edits)
        await update.send_for_good(new)
        digests |= {block.index: block.digest for block in new}
    return about.sealed(with_blocks(about.tensor, digests), log, overlay.seq)


def _edited(about: Table, old: Mapping[int, memoryview], edits: Mapping[int, Edit]) -> list[NewBlock]:
    made = (edited(about.tensor, index, old[index], edit) for index, edit in edits.items())
    return [block for block in made if block]


def _put(ids: Array, values: Array, about: Table, index: int, old: Array) -> Array:
    changed = old.copy()
    changed[ids - span(about.tensor, index)[0]] = values
    return changed


async def purge_horizon(follower: HistoryFollower, reader: BlockReader, name: str, log: str, otherwise: int = 0) -> int:
    """The sequence up to which no version that may still be read needs the log: it never goes back, since each new
    version holds at least as much as the one it was made from. `otherwise`: where none of them has the table.
    Raises NotFound, DeadlineExceeded."""
    history = follower.history
    versions = history.roots
    found: dict[Digest, int] = {}
    known: dict[Digest, Digest | None] = {}
    for root in history.retained(time.time_ns(), RETENTION_S):
        layer = _layer_of_table(versions, root, layer_name(name), known)
        if layer != _NONE and layer not in found:
            try:
                about = table(await reader.manifest(root, RequestContext.after(_ANSWER_S)), name)
            except NotFound:
                continue
            found[layer or root] = about.seal.seq if about.seal.log == log else 0
    return min(found.values(), default=otherwise)


def _layer_of_table(
    versions: Mapping[Digest, Version], root: Digest, layer: str, known: dict[Digest, Digest | None]
) -> Digest | None:
    """The digest of the table's layer in a version, by the commits that changed it: _NONE where the version has no such
    table, None where they don't tell."""
    path: list[Digest] = []
    at: Digest | None = root
    digest: Digest | None = None
    while at is not None and at not in known:
        path.append(at)
        version = versions.get(at)
        commit = version.commit if version else None
        if commit:
            digest = dict(commit.layers).get(layer, _NONE if commit.parent is None else None)
        at = commit.parent if commit and digest is None else None
    if digest is None and at is not None:
        digest = known[at]
    known.update(dict.fromkeys(path, digest))
    return digest
