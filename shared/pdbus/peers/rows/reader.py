"""Asks param-servers for rows of sparse tables: each of a server that owns its block, in batches."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.context import RequestContext
from pdbus.errors import Corrupt, DeadlineExceeded, InvalidRequest, NotFound, PdbusError, Unavailable
from pdbus.messages.bulk import BlockHead
from pdbus.messages.common import Digest
from pdbus.messages.rows import TableRead, TableRows
from pdbus.peers.weights import BlockReader, HasHistory
from pdbus.subjects import TABLE_READ
from pdbus.weights.blocks import Array, shard_of
from pdbus.weights.placement import REPLICAS, ranked
from pdbus.weights.tables import LINE, Table, encoded_ids, table

INLINE_BYTES = 512 << 10
"""Of values that come in the reply itself; more come on a bulk stream."""
MOST_READ_ROWS = 65_536
LARGEST_READ_BYTES = 32 << 20
"""Of one read."""
_REPLY_S = 2.0
_AT_ONCE = 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2


@dataclass(frozen=True, slots=True)
class Rows:
    """Values of rows, [ids, width], in the order asked for; each as of `seq` or newer."""

    values: Array
    seq: int
    """Of the table's log."""
    log: str
    """Names the log that `seq` counts in."""


class RowReader:
    """Reads rows of one model's tables. No life of its own."""

    def __init__(self, bus: Bus, model: str, follower: HasHistory, fleet: Fleet, reader: BlockReader) -> None:
        self._bus, self._model = bus, model
        self._follower, self._fleet, self._reader = follower, fleet, reader
        self._shards: dict[tuple[str, int], Array] = {}
        """By tensor and number of blocks, the shard of each block."""

    async def table(self, name: str, ctx: RequestContext) -> tuple[Digest, Table]:
        """The table in the head of the line, and that head. Raises NotFound, DeadlineExceeded."""
        head = self._follower.history.head(LINE)
        if head is None:
            raise NotFound(f"{self._model} has no version yet")
        return head, table(await self._reader.manifest(head, ctx), name)

    async def read(self, about: Table, ids: Array, at_least: int, ctx: RequestContext) -> Rows:
        """Rows of a table by id (int64, 0 to rows - 1, repeats allowed), at least as of the log's sequence `at_least`.

        A server that fails or isn't so far is followed by the next. Raises DeadlineExceeded, saying what went wrong
        last; InvalidRequest."""
        values = np.empty((len(ids), about.width), np.float32)
        left = np.arange(len(ids))
        shards = self._shards_of(about)[ids // about.block_rows]
        tried: set[str] = set()
        replies: list[TableRows] = []
        pause_s, turn = _FIRST_PAUSE_S, random.randrange(REPLICAS)  # noqa: S311 - spreads the load
        reason = "there is no param-server"
        while True:
            parts = self._parts(shards, left, turn, tried)
            outcomes = await self._ask(about, ids, parts, at_least, values, ctx)
            failed: list[Array] = []
            for (server, positions), outcome in zip(parts, outcomes, strict=True):
                if isinstance(outcome, TableRows) and (not replies or outcome.log == replies[0].log):
                    replies.append(outcome)
                    continue
                if isinstance(outcome, TableRows):
                    reason = f"{server} follows another log"
                elif not ctx.deadline.passed:  # else it says no more than that
                    reason = outcome.message
                tried.add(server)
                failed.append(positions)
            if parts and not failed:
                return Rows(values, min(reply.seq for reply in replies), replies[0].log)
            left = np.concatenate(failed) if failed else left
            if tried.issuperset(self._members()):
                if ctx.deadline.remaining_s <= pause_s:
                    raise DeadlineExceeded(f"rows of {about.name} could not be read in time: {reason}")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                tried.clear()

    def _members(self) -> Sequence[str]:
        return self._follower.history.members

    def _parts(self, shards: Array, left: Array, turn: int, avoid: Collection[str]) -> list[tuple[str, Array]]:
        """(server, positions) to ask for now, in batches."""
        members = self._members()
        if not members:
            return []
        by_server: defaultdict[str, list[Array]] = defaultdict(list)
        for shard in np.unique(shards[left]).tolist() if len(left) else [0]:
            order = ranked(shard, members)
            owners = (*order[turn:REPLICAS], *order[:turn], *order[REPLICAS:])
            best = min(owners, key=lambda server: (server in avoid, self._fleet.state(server) != "live"))
            by_server[best].append(left[shards[left] == shard])
        return [(server, np.concatenate(found)) for server, found in by_server.items()]

    async def _ask(
        self,
        about: Table,
        ids: Array,
        parts: Sequence[tuple[str, Array]],
        at_least: int,
        values: Array,
        ctx: RequestContext,
    ) -> list[TableRows | PdbusError]:
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(server: str, positions: Array) -> TableRows | PdbusError:
            replies = []
            try:
                for batch in _batches(positions, about):
                    async with gate:
                        reply, found = await self._call(about, server, ids[batch], at_least, ctx)
                    values[batch] = found
                    replies.append(reply)
            except InvalidRequest:
                raise
            except PdbusError as error:
                return error
            return min(replies, key=lambda reply: reply.seq)

        return list(await asyncio.gather(*(one(server, positions) for server, positions in parts)))

    async def _call(
        self, about: Table, server: str, ids: Array, at_least: int, ctx: RequestContext
    ) -> tuple[TableRows, Array]:
        to, near = TABLE_READ(model=self._model, server=server), ctx.within(_REPLY_S)
        size = 4 * about.width * len(ids)
        if size <= INLINE_BYTES:
            reply = await self._bus.call(to, TableRead(about.name, encoded_ids(ids), at_least), near)
            _check(reply, about)
            content: bytes | bytearray | memoryview = reply.values
        else:
            async with self._bus.bulk.receive(ctx.deadline) as incoming:
                place = {"receiver": self._bus.bulk.address, "stream": incoming.stream}
                reply = await self._bus.call(to, TableRead(about.name, encoded_ids(ids), at_least, **place), near)
                _check(reply, about)
                content = b""
                async for _, body in incoming.items(BlockHead, ctx.deadline):
                    content = body
        if len(content) != size:
            raise Corrupt(f"{server} sent {len(content)} bytes for {len(ids)} rows of {about.name}")
        return reply, np.frombuffer(content, "<f4").reshape(len(ids), about.width)

    def _shards_of(self, about: Table) -> Array:
        blocks = len(about.tensor.blocks)
        key = about.tensor.name, blocks
        if key not in self._shards:
            self._shards[key] = np.array([shard_of(about.tensor.name, index) for index in range(blocks)], np.int8)
        return self._shards[key]


def _check(reply: TableRows, about: Table) -> None:
    """Raises Unavailable for what another server may have, or this one soon."""
    if reply.behind:
        raise Unavailable(f"{reply.server} is at sequence {reply.seq} of the log")
    if reply.origin != about.seal.origin or reply.width != about.width:
        raise Unavailable(f"{reply.server} has another table of that name")


def _batches(positions: Array, about: Table) -> Iterator[Array]:
    most = max(1, min(MOST_READ_ROWS, LARGEST_READ_BYTES // (4 * about.width)))
    for start in range(0, max(len(positions), 1), most):
        yield positions[start : start + most]
