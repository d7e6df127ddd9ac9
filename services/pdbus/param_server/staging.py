"""Takes the blocks of updates, before any commit names them (DESIGN.md section 4: stage, prepare).

    Stage      opens or continues a transaction here; its blocks come on a bulk stream into a pack of their own
    Prepare    answers once all that was staged is durable, with what is missing

A staged block is like any other: by its digest, and seen by nobody who can't name it. What holds it is the transaction,
until the log has its commit (then the version does) or its abort. After its deadline anyone may append that abort.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Self

from pdbus.buffer import Buffer
from pdbus.bus.bus import Bus
from pdbus.bus.serving import Registration
from pdbus.caching.compression import unpack
from pdbus.canonical import DIGEST_BYTES, content_digest
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, Corrupt, InvalidRequest, Overloaded, PdbusError, TooLarge, Unavailable
from pdbus.messages.bulk import StagedHead
from pdbus.messages.param_server import Prepare, PrepareReply, Stage, StagedBlock, StageReply
from pdbus.param_server.commit import LogWriter
from pdbus.param_server.pack import PackWriter
from pdbus.param_server.store import BlockStore
from pdbus.param_server.transactions import Transactions
from pdbus.peers.background import Background
from pdbus.peers.history import HistoryFollower
from pdbus.subjects import WEIGHTS_PREPARE, WEIGHTS_STAGE
from pdbus.tasks import cancelled
from pdbus.weights.delta import applied
from pdbus.weights.history import History

log = logging.getLogger(__name__)

MOST_BLOCKS = 1024
"""In one Stage."""
MOST_DIGESTS = 8192
"""In one Prepare."""
_LARGEST_BLOCK = 64 << 20
_AT_ONCE, _WAITING, _WAITING_BYTES = 4, 64, 4 << 30
_LONGEST_S = 600.0
"""From the first Stage to the commit."""
_BEGINS_S = 5.0
"""From the answer to a Stage to the first of its blocks. The answer may be lost, or its coordinator: Prepare waits for
what is coming, and only so many streams are taken at once. Who is late asks again."""
_TICK_S = 1.0
_APPEND_S = 10.0


class Staging:
    """While entered, takes updates. `lock` keeps what rests on stored blocks and their reclaiming apart."""

    def __init__(
        self, bus: Bus, model: str, server: str, store: BlockStore, follower: HistoryFollower, writer: LogWriter
    ) -> None:
        self._bus, self._model, self._server = bus, model, server
        self._store, self._follower, self._writer = store, follower, writer
        self.transactions = Transactions(store.folder)
        self.lock = asyncio.Lock()
        self._takes = Background(_AT_ONCE, _WAITING, _WAITING_BYTES)
        self._taking: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._registrations: list[Registration[Stage, StageReply] | Registration[Prepare, PrepareReply]] = []
        self._ticking: asyncio.Task[None] | None = None
        self._stop_listening: Callable[[], None] = lambda: None

    @property
    def taking(self) -> int:
        """Streams of staged blocks under way to here."""
        return len(self._takes)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.transactions.load)
        self._stop_listening = self._follower.on_change(self._settle)
        self._settle(self._follower.history)
        place = {"model": self._model, "server": self._server}
        self._registrations = [
            await self._bus.serve(WEIGHTS_STAGE(**place), self._stage),
            await self._bus.serve(WEIGHTS_PREPARE(**place), self._prepare),
        ]
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_intake()
        self._stop_listening()
        await cancelled(self._ticking)
        await self._takes.close()

    async def stop_intake(self) -> None:
        registrations, self._registrations = self._registrations, []
        for registration in registrations:
            await registration.close()

    async def _stage(self, message: Stage, ctx: RequestContext) -> StageReply:
        _check(message)
        blocks = message.blocks
        async with self.lock:
            self._check_open(message.tx, message.deadline_ns)
            pin = partial(self.transactions.pin, message.tx, message.deadline_ns, [block.digest for block in blocks])
            await asyncio.to_thread(pin)
            have = tuple(block.digest in self._store for block in blocks)
        coming = [None if here else block for here, block in zip(have, blocks, strict=True)]
        size = sum(block.size for block in coming if block)
        if not size:
            return StageReply(self._server, "", "", have)
        self._store.require_room(size)
        return StageReply(self._server, self._bus.bulk.address, await self._open(message, coming, size), have)

    async def _open(self, message: Stage, coming: Sequence[StagedBlock | None], size: int) -> str:
        """The stream on which the blocks are to come."""
        opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        deadline = Deadline.from_wire(message.deadline_ns)
        if not self._takes.start(size, partial(self._take, coming, deadline, opened, done)):
            raise Overloaded(f"{self._server} is taking as much as it can", retry_after_s=0.5)
        self._taking[message.tx].add(done)
        done.add_done_callback(partial(self._taken, message.tx))
        return await opened

    def _taken(self, tx: str, done: asyncio.Future[None]) -> None:
        self._taking[tx].discard(done)
        if not self._taking[tx]:
            del self._taking[tx]

    async def _take(
        self,
        coming: Sequence[StagedBlock | None],
        deadline: Deadline,
        opened: asyncio.Future[str],
        done: asyncio.Future[None],
    ) -> None:
        try:
            async with self._bus.bulk.receive(deadline) as incoming, self._pack() as pack:
                if opened.done():  # its sender gave up waiting
                    return
                incoming.begins_by(Deadline.after(_BEGINS_S))
                opened.set_result(incoming.stream)
                async for head, body in incoming.items(StagedHead, deadline):
                    block = coming[head.index] if 0 <= head.index < len(coming) else None
                    if block is None:
                        raise Corrupt("a block came that was not wanted")
                    await asyncio.to_thread(self._add, pack, block, head, memoryview(body))
        finally:
            if not opened.done():
                opened.set_exception(Unavailable(f"{self._server} could not open a stream"))
            done.set_result(None)

    @asynccontextmanager
    async def _pack(self) -> AsyncIterator[PackWriter]:
        """A new pack; made durable in a thread, which may take as long as the disk does."""
        writing = self._store.writing()
        pack = await asyncio.to_thread(writing.__enter__)
        try:
            yield pack
        except BaseException as error:
            await asyncio.shield(asyncio.to_thread(writing.__exit__, type(error), error, error.__traceback__))
            raise
        await asyncio.to_thread(writing.__exit__, None, None, None)

    def _add(self, pack: PackWriter, block: StagedBlock, head: StagedHead, body: memoryview) -> None:
        """Where what came doesn't make the block, Prepare will tell that it is missing."""
        if content := self._made(block, head, body):
            pack.add(block.digest, memoryview(content))

    def _made(self, block: StagedBlock, head: StagedHead, body: memoryview) -> Buffer | None:
        """The block itself; None where what came doesn't make it."""
        base = self._store.read(block.base) if block.base else None
        if block.form != "whole" and base is None:
            return None
        if not 0 <= head.unpacked <= _LARGEST_BLOCK:
            raise Corrupt("a block that unpacks to more than a block may have")
        try:
            content: Buffer = unpack(body, head.unpacked) if head.unpacked else body
            made = content if block.form == "whole" else applied(block.form, base or b"", content)
        except (Corrupt, ValueError) as error:
            log.info("block %s can't be made of what came: %s", block.digest.hex()[:12], error)
            return None
        return made if content_digest(made) == block.digest else None

    async def _prepare(self, message: Prepare, ctx: RequestContext) -> PrepareReply:
        if len(message.digests) > MOST_DIGESTS:
            raise TooLarge(f"{len(message.digests)} digests; at most {MOST_DIGESTS} at once", param="digests")
        self._check_open(message.tx, message.deadline_ns)
        async with self.lock:
            await asyncio.to_thread(self.transactions.pin, message.tx, message.deadline_ns, message.digests)
        if taking := self._taking.get(message.tx):
            await asyncio.wait(taking, timeout=max(ctx.deadline.remaining_s, 0.0))
        missing = tuple(digest for digest in message.digests if digest not in self._store)
        return PrepareReply(self._server, missing)

    def _check_open(self, tx: str, deadline_ns: int) -> None:
        if not self._follower.history.is_open(tx):
            raise Conflict(f"the transaction {tx} has ended")
        remaining_s = Deadline.from_wire(deadline_ns).remaining_s
        if not 0.0 < remaining_s <= _LONGEST_S:
            raise InvalidRequest(f"a transaction has at most {_LONGEST_S:.0f} s, and some left", param="deadline_ns")

    def _settle(self, history: History) -> None:
        for one in self.transactions:
            if not history.is_open(one.tx):
                self.transactions.close(one.tx)

    async def _tick(self) -> None:
        """Aborts what was left open beyond its deadline, by a coordinator that died."""
        while True:
            await asyncio.sleep(_TICK_S)
            late = [one.tx for one in self.transactions if one.deadline_ns < time.time_ns()]
            for tx in late:
                try:
                    await self._writer.abort(
                        tx, "the update was not committed by its deadline", Deadline.after(_APPEND_S)
                    )
                except PdbusError as error:
                    log.warning("the transaction %s could not be aborted: %s", tx, error.message)


def _check(message: Stage) -> None:
    if not 0 < len(message.blocks) <= MOST_BLOCKS:
        raise TooLarge(f"1 to {MOST_BLOCKS} blocks at once, not {len(message.blocks)}", param="blocks")
    for block in message.blocks:
        digests = [block.digest] if block.base is None else [block.digest, block.base]
        if any(len(digest) != DIGEST_BYTES for digest in digests):
            raise InvalidRequest(f"a digest has {DIGEST_BYTES} bytes", param="blocks")
        if not 0 < block.size <= _LARGEST_BLOCK:
            raise InvalidRequest(f"a block has 1 to {_LARGEST_BLOCK} bytes", param="blocks")
        if block.form != "whole" and block.base is None:
            raise InvalidRequest(f"a {block.form} delta needs a base", param="blocks")
    if len({block.digest for block in message.blocks}) != len(message.blocks):
        raise InvalidRequest("a block comes twice", param="blocks")
