"""Brings blocks by digest from param-servers: several shards at once, each from whichever source has them.

Every block is checked against its digest before anyone sees it. A source that lacks a block, sends a wrong one, breaks
off or does not answer is followed by the next; when none is left, all are asked again until the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pdbus.bus.bulk_receive import Incoming
from pdbus.bus.bus import Bus
from pdbus.canonical import content_digest
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Corrupt, DeadlineExceeded, NotFound, PdbusError, Unavailable
from pdbus.messages.bulk import BlockHead
from pdbus.messages.common import Digest
from pdbus.messages.param_server import BlocksReply, BlocksRequest
from pdbus.subjects import To
from pdbus.telemetry.spans import meter
from pdbus.weights.placement import REPLICAS

log = logging.getLogger(__name__)

PARALLEL = 4
"""Transfers at a time: half of the streams that a process may receive."""
BATCH_BLOCKS = 256
"""Blocks asked for at once: 64 MiB, as a rule."""
REPLY_S = 4.0
"""A source that lets a reader wait longer has died since it was asked, hangs, or has too many others to serve."""
STALL_S = 4.0
"""Without a block for so long, a source is given up."""
SHUNNED_S = 30.0
"""A source whose stream broke is asked after all others for so long."""
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
    """`sources` tells whom to ask. No life of its own: a fetch that ends or is cancelled leaves nothing behind but the
    memory of sources that broke."""

    def __init__(self, bus: Bus, sources: Sources) -> None:
        self._bus = bus
        self._sources = sources
        self._fetched = meter().create_counter("pdbus.blocks.fetched", "By", "Of weight blocks that came")
        self._shunned: dict[str, float] = {}
        """Until when (monotonic), by kind."""

    async def fetch(self, wanted: Iterable[Wanted], sink: Sink, ctx: RequestContext) -> None:
        """Gives every wanted block to `sink` once, in any order. Raises DeadlineExceeded, saying what went wrong last;
        what `sink` raises ends it too."""
        left = _distinct(wanted)
        pause_s, told = _FIRST_PAUSE_S, ""
        while reason := await self._round(left, sink, ctx):
            if not told or not ctx.deadline.passed:  # a round that the deadline cut off says no more than that
                told = reason
            if ctx.deadline.remaining_s <= pause_s:
                raise DeadlineExceeded(f"{len(left)} weight blocks could not be fetched in time: {told}")
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def fetch_some(self, wanted: Iterable[Wanted], sink: Sink, ctx: RequestContext) -> str:
        """Asks every source once. Returns why something is missing; empty when nothing is."""
        return await self._round(_distinct(wanted), sink, ctx)

    async def _round(self, left: dict[Digest, Wanted], sink: Sink, ctx: RequestContext) -> str:
        """Takes out of `left` what came."""
        gate = asyncio.Semaphore(PARALLEL)
        reasons: list[str] = []

        async def bring(sources: Sequence[Source], batch: dict[Digest, Wanted]) -> None:
            async with gate:
                for source in sorted(sources, key=self._is_shunned):
                    asked = len(batch)
                    try:
                        await self._transfer(source, batch, sink, ctx)
                    except PdbusError as error:
                        reasons.append(error.message)
                        log.debug("%d of %d blocks from %s: %s", asked - len(batch), asked, source.name, error.message)
                        if isinstance(error, _Broken):
                            self._shunned[_kind(source)] = time.monotonic() + SHUNNED_S
                    if not batch or ctx.deadline.passed:
                        return

        batches = list(self._batches(left))
        try:
            async with asyncio.TaskGroup() as group:
                for sources, batch in batches:
                    group.create_task(bring(sources, batch))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        missing = {digest for _, batch in batches for digest in batch}
        for digest in left.keys() - missing:
            del left[digest]
        return (reasons[-1] if reasons else "there is nobody to ask") if left else ""

    def _is_shunned(self, source: Source) -> bool:
        return self._shunned.get(_kind(source), 0.0) > time.monotonic()

    def _batches(self, wanted: Mapping[Digest, Wanted]) -> Iterator[tuple[Sequence[Source], dict[Digest, Wanted]]]:
        """What is asked for at once. Shards with the same owners are in one batch: whoever is in the group of one of
        them is, as a rule, in that of the others, and a layer's few blocks are not asked for one by one."""
        sources_of = {shard: self._sources(shard) for shard in {want.shard for want in wanted.values()}}
        alike: defaultdict[frozenset[str], list[Wanted]] = defaultdict(list)
        for want in wanted.values():
            alike[_owners(sources_of[want.shard])].append(want)
        for wants in alike.values():
            size = min(BATCH_BLOCKS, -(-len(wants) // PARALLEL))
            for start in range(0, len(wants), size):
                some = wants[start : start + size]
                yield sources_of[some[0].shard], {want.digest: want for want in some}

    async def _transfer(self, source: Source, left: dict[Digest, Wanted], sink: Sink, ctx: RequestContext) -> None:
        """Asks one source for all of `left` and takes out of it what came. Raises PdbusError when something did not."""
        asked = tuple(left.values())
        async with self._bus.bulk.receive(ctx.deadline) as incoming:
            request = BlocksRequest(tuple(want.digest for want in asked), self._bus.bulk.address, incoming.stream)
            try:
                reply = await self._bus.call(source, request, ctx.within(REPLY_S))
            except DeadlineExceeded as error:
                raise _Broken(error.message) from error
            try:
                await self._take(incoming, _coming(asked, reply), left, sink, ctx.deadline)
            except (PdbusError, TimeoutError) as error:
                why = error.message if isinstance(error, PdbusError) else "nothing more came"
                raise _Broken(f"{reply.server}: {why}") from error
        if left:
            raise NotFound(f"{reply.server} lacks {len(left)} of the blocks")

    async def _take(
        self,
        incoming: Incoming,
        coming: dict[int, Wanted],
        left: dict[Digest, Wanted],
        sink: Sink,
        deadline: Deadline,
    ) -> None:
        """Raises PdbusError when the stream ends early or holds something else than announced; TimeoutError."""
        came_bytes = 0
        try:
            async with asyncio.timeout(STALL_S) as stall:
                async for head, body in incoming.items(BlockHead, deadline):
                    want = coming.pop(head.index, None)
                    content = memoryview(body)
                    if want is None or content_digest(content) != want.digest:
                        raise Corrupt("a block is not the one asked for")
                    try:
                        await sink(want.digest, content)
                    except PdbusError as error:
                        raise _SinkFailed(error) from error
                    came_bytes += len(content)
                    del left[want.digest]
                    stall.reschedule(asyncio.get_running_loop().time() + STALL_S)
        finally:
            self._fetched.add(came_bytes)  # once: counting takes longer than checking a small block
        if coming:
            raise Unavailable(f"the stream ended with {len(coming)} blocks missing")


class _Broken(Unavailable):
    """The source is silent, or its stream can't be trusted or did not come to its end."""


class _SinkFailed(Exception):
    """Not the source's fault: asking another one won't help."""

    def __init__(self, error: PdbusError) -> None:
        super().__init__(error.message)
        self.error = error


def _kind(source: Source) -> str:
    """A server by its name; all groups are one kind, since the same servers are in them."""
    return source.subject.template if source.subject.queue else source.name


def _distinct(wanted: Iterable[Wanted]) -> dict[Digest, Wanted]:
    """Equal blocks of several names travel once."""
    found: dict[Digest, Wanted] = {}
    for want in wanted:
        found.setdefault(want.digest, want)
    return found


def _owners(sources: Sequence[Source]) -> frozenset[str]:
    """Of a shard: its first named sources."""
    named = [source.name for source in sources if not source.subject.queue]
    return frozenset(named[:REPLICAS])


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
    if isinstance(first, BaseExceptionGroup):
        return _first(first)
    return first.error if isinstance(first, _SinkFailed) else first
