"""Brings the blocks of one update to their owners, and sees to it that they are durable there."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing

from pdbus.backoff import backoff_s
from pdbus.buffer import Buffer
from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.caching.compression import pack
from pdbus.canonical import content_digest
from pdbus.client.weights.edits import NewBlock
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, Corrupt, DeadlineExceeded, InvalidRequest, PdbusError
from pdbus.messages.bulk import StagedHead
from pdbus.messages.common import Digest
from pdbus.messages.param_server import Prepare, Stage, StagedBlock
from pdbus.peers.history import HistoryFollower
from pdbus.subjects import WEIGHTS_PREPARE, WEIGHTS_STAGE, transfer_to
from pdbus.tasks import cancelled
from pdbus.weights.placement import REPLICAS, ranked

_MOST_BLOCKS = 512
_MOST_BYTES = 64 << 20
"""Of one stream: what is lost with it is sent again."""
_BATCH_BYTES = 16 << 20
"""So much waits here to travel together: each stream costs both ends its round trips, and the server a pack."""
_PACKED_BYTES = 2 << 20
"""Packed in one turn of a thread, while what was packed before travels."""
_LEVEL, _WORTH = 1, 0.6
"""Of zstd: what it saves less of, a local network brings sooner than both ends pack and unpack it."""
_MOST_DIGESTS = 4096
_AT_ONCE = 4
_ANSWER_S = 10.0


class Stager:
    """`staged` blocks are kept until the end: a server that could not make one of its delta gets it whole."""

    def __init__(
        self,
        bus: Bus,
        model: str,
        follower: HistoryFollower,
        fleet: Fleet,
        tx: str,
        deadline: Deadline,
        deadline_ns: int,
    ) -> None:
        """`deadline_ns`: wall clock. Servers know the transaction by it: the same in all processes that share it."""
        self._bus, self._model, self._follower, self._fleet = bus, model, follower, fleet
        self._tx, self._deadline = tx, deadline
        self._deadline_ns = deadline_ns
        self._rng = random.Random()  # noqa: S311 - spreads retries
        self._blocks: dict[Digest, NewBlock] = {}
        self._everywhere: set[Digest] = set()
        self._waiting: dict[Digest, NewBlock] = {}
        self.sent_bytes = 0
        """Of block contents, as they travelled."""

    def live(self) -> tuple[str, ...]:
        """The servers that updates go to, by id."""
        members = set(self._follower.history.members)
        cards = self._fleet.live("param_server")
        return tuple(card.id for card in cards if card.model == self._model and card.id in members)

    async def send(self, blocks: Sequence[NewBlock], *, everywhere: bool = False) -> None:
        """Blocks for their owners, or for every server. They travel once enough of them wait, or with `settle`, which
        is also left with a server that fails. Their memory must stay as it is until then.

        Raises DeadlineExceeded where no server is there, Conflict where the transaction has ended."""
        distinct = {block.digest: block for block in blocks}
        self._blocks |= distinct
        self._waiting |= distinct
        if everywhere:
            self._everywhere |= distinct.keys()
        if sum(len(block.content) for block in self._waiting.values()) >= _BATCH_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        if self._waiting:
            await self._somebody()
            blocks, self._waiting = self._waiting, {}
            await self._send(self._places(blocks.values()))

    async def settle(self) -> None:
        """Returns once every block is durable on as many owners as there can be. Raises DeadlineExceeded, Conflict
        where the transaction has ended meanwhile."""
        await self._flush()
        retries = 0
        while lacking := await self._lacking():
            retries += 1
            wait_s = backoff_s(retries, self._rng) if retries > 1 else 0.0
            if self._deadline.remaining_s <= wait_s:
                raise DeadlineExceeded(f"{', '.join(sorted(lacking))} did not take all of the update in time")
            await asyncio.sleep(wait_s)
            await self._send(lacking, whole=True)

    async def let_go(self) -> None:
        """As `settle`, and keeps none of the blocks: for updates that are larger than memory."""
        await self.settle()
        self._blocks.clear()
        self._everywhere.clear()

    def _places(self, blocks: Iterable[NewBlock]) -> dict[str, list[NewBlock]]:
        """By server, the blocks that it is to hold now."""
        live = self.live()
        ranks: dict[int, tuple[str, ...]] = {}
        places: defaultdict[str, list[NewBlock]] = defaultdict(list)
        for block in blocks:
            if block.digest in self._everywhere:
                owners: Collection[str] = live
            else:
                shard = block.shard
                owners = ranks.get(shard) or ranks.setdefault(shard, ranked(shard, live)[:REPLICAS])
            for server in owners:
                places[server].append(block)
        return dict(places)

    async def _send(self, places: Mapping[str, Sequence[NewBlock]], *, whole: bool = False) -> None:
        gate = asyncio.Semaphore(_AT_ONCE)

        async def send(server: str, part: Sequence[NewBlock]) -> None:
            async with gate:
                try:
                    await self._stage(server, part, whole)
                except (Conflict, InvalidRequest):
                    raise
                except PdbusError:
                    return  # `settle` sees what is missing

        try:
            async with asyncio.TaskGroup() as group:
                for server, blocks in places.items():
                    for part in _cut(blocks, _MOST_BYTES):
                        group.create_task(send(server, part))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _stage(self, server: str, blocks: Sequence[NewBlock], whole: bool) -> None:
        told = tuple(
            StagedBlock(block.digest, len(block.content))
            if whole
            else StagedBlock(block.digest, len(block.content), block.form, block.base)
            for block in blocks
        )
        ctx = RequestContext(self._deadline.within(_ANSWER_S))
        to = WEIGHTS_STAGE(model=self._model, server=server)
        reply = await self._bus.call(to, Stage(self._tx, told, self._deadline_ns), ctx)
        if len(reply.have) != len(blocks):
            raise Corrupt(f"param-server {server} answered {len(reply.have)} of {len(blocks)} blocks")
        if all(reply.have):
            return
        subject = transfer_to(reply.address, reply.stream)
        index = {block.digest: at for at, block in enumerate(blocks)}
        wanted = [block for block, have in zip(blocks, reply.have, strict=True) if not have]
        async with (
            self._bus.bulk.send(subject, self._deadline) as out,
            aclosing(_packed_ahead(wanted, whole)) as packed,
        ):
            async for block, unpacked, body in packed:
                self.sent_bytes += len(body)
                await out.item(StagedHead(index[block.digest], unpacked), body)

    async def _lacking(self) -> dict[str, list[NewBlock]]:
        """What each server has still to be sent, by its own word; all, where it doesn't answer but is there."""
        places = self._places(self._blocks.values())
        if not places:
            await self._somebody()
            places = self._places(self._blocks.values())

        async def ask(server: str, blocks: Sequence[NewBlock]) -> list[NewBlock]:
            missing: set[Digest] = set()
            for start in range(0, len(blocks), _MOST_DIGESTS):
                digests = tuple(block.digest for block in blocks[start : start + _MOST_DIGESTS])
                ctx = RequestContext(self._deadline.within(_ANSWER_S))
                message = Prepare(self._tx, digests, self._deadline_ns)
                try:
                    reply = await self._bus.call(WEIGHTS_PREPARE(model=self._model, server=server), message, ctx)
                except (Conflict, InvalidRequest):
                    raise
                except PdbusError:
                    missing.update(digests)
                else:
                    missing.update(reply.missing)
            return [block for block in blocks if block.digest in missing]

        answers = await asyncio.gather(*(ask(server, blocks) for server, blocks in places.items()))
        return {server: lacking for server, lacking in zip(places, answers, strict=True) if lacking}

    async def _somebody(self) -> None:
        try:
            await self._fleet.wait_for(lambda _: bool(self.live()), self._deadline)
        except (DeadlineExceeded, TimeoutError):
            raise DeadlineExceeded("no param-server is there to take the update") from None


async def _packed_ahead(blocks: Sequence[NewBlock], whole: bool) -> AsyncGenerator[tuple[NewBlock, int, Buffer], None]:
    """As `_packed`; some are packed while those before them are sent."""
    coming: asyncio.Task[list[tuple[NewBlock, int, Buffer]]] | None = None
    try:
        for some in (*_cut(blocks, _PACKED_BYTES), ()):
            made, coming = coming, asyncio.create_task(asyncio.to_thread(_packed, some, whole)) if some else None
            for item in await made if made else ():
                yield item
    finally:
        await cancelled(coming)


def _packed(blocks: Sequence[NewBlock], whole: bool) -> list[tuple[NewBlock, int, Buffer]]:
    """What travels of each, and how many bytes that unpacks to (0: it isn't packed).

    Raises InvalidRequest where a block that has to be sent again is no longer what it was."""
    items: list[tuple[NewBlock, int, Buffer]] = []
    for block in blocks:
        if whole and content_digest(block.content) != block.digest:
            raise InvalidRequest(f"{block.tensor} changed while it was being pushed", param=block.tensor)
        body: Buffer = block.content if whole or block.body is None else block.body
        packed = pack(body, level=_LEVEL, worth=_WORTH)
        items.append((block, len(body) if packed else 0, packed or body))
    return items


def _cut(blocks: Sequence[NewBlock], most_bytes: int) -> Iterator[Sequence[NewBlock]]:
    part: list[NewBlock] = []
    size = 0
    for block in blocks:
        if part and (len(part) >= _MOST_BLOCKS or size + len(block.content) > most_bytes):
            yield part
            part, size = [], 0
        part.append(block)
        size += len(block.content)
    if part:
        yield part
