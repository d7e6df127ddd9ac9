"""Answers requests for blocks: a reply that says what comes, then the blocks on a bulk stream to the reader."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from pdbus.bus.bus import Bus
from pdbus.bus.serving import Registration
from pdbus.canonical import DIGEST_BYTES
from pdbus.context import Deadline, RequestContext
from pdbus.errors import InvalidRequest, NotFound, Overloaded, PdbusError, TooLarge, Unavailable
from pdbus.messages.bulk import BlockHead
from pdbus.messages.common import Digest
from pdbus.messages.param_server import BlocksReply, BlocksRequest
from pdbus.param_server.heat import Heat
from pdbus.param_server.store import BlockStore
from pdbus.subjects import WEIGHT_BLOCKS, WEIGHT_BLOCKS_OF, transfer_to
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)

MAX_BLOCKS = 1024
"""In one request: 256 MiB, as a rule."""
SENDING = 8
"""Streams sent at a time; more requests wait for one of them to end."""
WAITING = 64
SEND_S = 60.0
_PLACE = re.compile(r"[A-Za-z0-9_-]{1,128}")
"""A bulk address, or a stream at it."""


class BlockServer:
    """Serves the store's blocks under this server's own name, and in the groups of the shards given to `join`."""

    def __init__(self, bus: Bus, model: str, server: str, store: BlockStore) -> None:
        self._bus = bus
        self._model = model
        self._server = server
        self._store = store
        self._named: Registration[BlocksRequest, BlocksReply] | None = None
        self._groups: dict[int, Registration[BlocksRequest, BlocksReply]] = {}
        self._slots = asyncio.Semaphore(SENDING)
        self._waiting = 0
        self._sends: set[asyncio.Task[None]] = set()
        self._open = True
        self.heat = Heat()
        """Of the blocks that it sends, and of those that commits change (upkeep.py)."""
        self.on_spoilt: Callable[[], None] = lambda: None
        """Called when blocks were found damaged on disk."""

    async def __aenter__(self) -> Self:
        to = WEIGHT_BLOCKS_OF(model=self._model, server=self._server)
        self._named = await self._bus.serve(to, self._answer, limit=SENDING + WAITING)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_intake()
        await cancelled(*self._sends)

    @property
    def sending(self) -> int:
        return len(self._sends)

    @property
    def waiting(self) -> int:
        return self._waiting

    async def join(self, shards: frozenset[int]) -> None:
        """Serves in the groups of exactly these shards from now on: the caller has seen that the store holds them."""
        for shard in self._groups.keys() - shards:
            await self._groups.pop(shard).close()
        for shard in sorted(shards - self._groups.keys()) if self._open else ():
            to = WEIGHT_BLOCKS(model=self._model, shard=str(shard))
            self._groups[shard] = await self._bus.serve(to, self._answer, limit=SENDING + WAITING)

    async def stop_intake(self) -> None:
        self._open = False
        await self.join(frozenset())
        if self._named:
            await self._named.close()
            self._named = None

    async def drain(self, deadline: Deadline) -> None:
        """Waits until what is being sent has arrived."""
        if self._sends:
            await asyncio.wait(self._sends, timeout=max(0.0, deadline.remaining_s))

    async def _answer(self, message: BlocksRequest, ctx: RequestContext) -> BlocksReply:
        _check(message)
        if not self._open:
            raise Unavailable(f"{self._server} is stopping")
        if self._waiting >= WAITING:
            raise Overloaded(f"{self._server} has {WAITING} readers waiting", retry_after_s=0.5)
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            spoilt = self._store.spoilt
            found = await asyncio.to_thread(self._read, message.digests)
            if self._store.spoilt > spoilt:
                self.on_spoilt()
            self.heat.read(
                digest for digest, content in zip(message.digests, found, strict=True) if content is not None
            )
            if not any(content is not None for content in found):
                raise NotFound(f"{self._server} has none of these {len(found)} blocks")
            send = asyncio.create_task(self._send(message, found, ctx.deadline.within(SEND_S)))
        except BaseException:
            self._slots.release()
            raise
        self._sends.add(send)
        send.add_done_callback(self._sent)
        return BlocksReply(self._server, tuple(-1 if content is None else len(content) for content in found))

    def _read(self, digests: Sequence[Digest]) -> list[memoryview | None]:
        return [self._store.read(digest) for digest in digests]

    async def _send(self, message: BlocksRequest, found: Sequence[memoryview | None], deadline: Deadline) -> None:
        try:
            subject = transfer_to(message.receiver, message.stream)
            async with self._bus.bulk.send(subject, deadline) as out:
                for index, content in enumerate(found):
                    if content is not None:
                        await out.item(BlockHead(index), content)
        except PdbusError as error:
            log.info("blocks to %s: %s", message.receiver, error.message)
        except Exception:
            log.exception("blocks to %s could not be sent", message.receiver)
        finally:
            self._store.unmap(message.digests)

    def _sent(self, send: asyncio.Task[None]) -> None:
        self._sends.discard(send)
        self._slots.release()


def _check(message: BlocksRequest) -> None:
    digests = message.digests
    if len(digests) > MAX_BLOCKS:
        raise TooLarge(f"{len(digests)} blocks asked for; at most {MAX_BLOCKS} at once", param="digests")
    if not digests:
        raise InvalidRequest("no block asked for", param="digests")
    if any(len(digest) != DIGEST_BYTES for digest in digests):
        raise InvalidRequest(f"a digest has {DIGEST_BYTES} bytes", param="digests")
    if len(set(digests)) != len(digests):
        raise InvalidRequest("a block is asked for twice", param="digests")
    for param, value in (("receiver", message.receiver), ("stream", message.stream)):
        if not _PLACE.fullmatch(value):
            raise InvalidRequest(f"{param} must be 1 to 128 characters of A-Z a-z 0-9 _ -", param=param)
