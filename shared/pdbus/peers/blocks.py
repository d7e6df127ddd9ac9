"""Brings blocks by digest from param-servers: several shards at once, each from whichever source has them.

Every block is checked against its digest before anyone sees it. A source that lacks a block, sends a wrong one, breaks
off or does not answer is followed by the next; when none is left, all are asked again until the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pdbus.bus.bus import Bus
from pdbus.canonical import content_digest
from pdbus.context import RequestContext
from pdbus.errors import Corrupt, DeadlineExceeded, PdbusError, Unavailable
from pdbus.messages.bulk import BlockHead
from pdbus.messages.common import Digest
from pdbus.messages.param_server import BlocksReply, BlocksRequest
from pdbus.subjects import To

log = logging.getLogger(__name__)

PARALLEL = 4
"""Transfers at a time: half of the streams that a process may receive."""
BATCH_BLOCKS = 256
"""Blocks asked for at once: 64 MiB, as a rule."""
TRANSFER_S = 60.0
"""Longer than any healthy transfer of a batch takes."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0

Source: TypeAlias = To[BlocksRequest, BlocksReply]
Sources: TypeAlias = Callable[[int], Sequence[Source]]
"""The sources of a shard's blocks, the best first; asked anew in each round, since members come and go."""
Sink: TypeAlias = Callable[[Digest, memoryview], Awaitable[None]]
"""Takes a checked block; its memory is the sink's only until it returns."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to bring. `size` in bytes; None where only the digest is known."""

    digest: Digest
    shard: int
    size: int | None = None


class BlockFetcher:
    """`sources` tells whom to ask. No life of its own: a fetch that ends or is cancelled leaves nothing behind."""

    def __init__(self, bus: Bus, sources: Sources) -> None:
        self._bus = bus
        self._sources = sources

    async def fetch(self, wanted: Iterable[Wanted], sink: Sink, ctx: RequestContext) -> None:
        """Gives every wanted block to `sink` once, in any order. Raises DeadlineExceeded, naming what nobody had."""
        gate = asyncio.Semaphore(PARALLEL)

        async def bring(shard: int, batch: dict[Digest, Wanted]) -> None:
            async with gate:
                await self._bring(shard, batch, sink, ctx)

        try:
            async with asyncio.TaskGroup() as group:
                for shard, batch in _batches(wanted):
                    group.create_task(bring(shard, batch))
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    async def _bring(self, shard: int, left: dict[Digest, Wanted], sink: Sink, ctx: RequestContext) -> None:
        pause_s = _FIRST_PAUSE_S
        reason = "nobody was there to ask"
        while True:
            for source in self._sources(shard):
                try:
                    await self._transfer(source, left, sink, ctx)
                except PdbusError as error:
                    reason = error.message
                    log.debug("blocks of shard %d from %s: %s", shard, source.name, error.message)
                if not left:
                    return
                if ctx.deadline.passed:
                    break
            if ctx.deadline.remaining_s <= pause_s:
                raise DeadlineExceeded(f"{len(left)} weight blocks of shard {shard} could not be fetched: {reason}")
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _transfer(self, source: Source, left: dict[Digest, Wanted], sink: Sink, ctx: RequestContext) -> None:
        """Asks one source for all of `left` and takes out of it what came. Raises PdbusError when something did not."""
        asked = tuple(left.values())
        ctx = ctx.within(TRANSFER_S)
        async with self._bus.bulk.receive() as incoming:
            request = BlocksRequest(tuple(want.digest for want in asked), self._bus.bulk.address, incoming.stream)
            reply = await self._bus.call(source, request, ctx)
            coming = _coming(asked, reply)
            async for head, body in incoming.items(BlockHead, ctx.deadline):
                want = coming.pop(head.index, None)
                content = memoryview(body)
                if want is None or content_digest(content) != want.digest:
                    raise Corrupt(f"{reply.server} sent a block that is not the one asked for")
                await sink(want.digest, content)
                del left[want.digest]
        if coming:
            raise Unavailable(f"{reply.server} ended its stream with {len(coming)} blocks missing")
        if left:
            raise Unavailable(f"{reply.server} lacks {len(left)} of the blocks")


def _batches(wanted: Iterable[Wanted]) -> Iterator[tuple[int, dict[Digest, Wanted]]]:
    by_shard: defaultdict[int, dict[Digest, Wanted]] = defaultdict(dict)
    seen: set[Digest] = set()
    for want in wanted:
        if want.digest not in seen:  # equal blocks of several names travel once
            seen.add(want.digest)
            by_shard[want.shard][want.digest] = want
    for shard, wants in by_shard.items():
        items = list(wants.items())
        for start in range(0, len(items), BATCH_BLOCKS):
            yield shard, dict(items[start : start + BATCH_BLOCKS])


def _coming(asked: Sequence[Wanted], reply: BlocksReply) -> dict[int, Wanted]:
    """What the source says it sends, by index. A wrong size is known before a byte of it travels."""
    if len(reply.sizes) != len(asked):
        raise Corrupt(f"{reply.server} answered for {len(reply.sizes)} blocks, not {len(asked)}")
    coming = {}
    for index, (want, size) in enumerate(zip(asked, reply.sizes, strict=True)):
        if size >= 0:
            if want.size not in (None, size):
                raise Corrupt(f"{reply.server} has {size} bytes for a block of {want.size}")
            coming[index] = want
    return coming


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
