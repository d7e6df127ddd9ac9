"""The second tier of the prefix cache: whole pages in the memory of the cache nodes, shared by all prefill workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections import OrderedDict
from types import TracebackType
from typing import Self

from pdbus.bus.presence import Fleet
from pdbus.context import RequestContext
from pdbus.engine.core import Core
from pdbus.engine.sequence import Sequence
from pdbus.errors import Corrupt
from pdbus.kv.codec import export_page, import_page
from pdbus.kv.prefix import PageKey
from pdbus.messages.common import Digest
from pdbus.peers.cache import CacheRing
from pdbus.tasks import cancelled

log = logging.getLogger(__name__)

TTL_S = 3600.0
_ASKED_AT_ONCE = 16
"""Pages of one read: together they stay below what a node and the bus can move in the ring's read deadline."""
_QUEUE = 64
"""Prompts whose pages wait to be written; more are not kept."""
_REMEMBERED = 8192


class PrefixTier:
    """Reads into the pages of sequences that are not ready, and writes pages back behind the requests."""

    def __init__(self, ring: CacheRing, fleet: Fleet, core: Core) -> None:
        self._ring, self._fleet, self._core = ring, fleet, core
        self._queue: asyncio.Queue[tuple[tuple[PageKey, ...], Digest, RequestContext]] = asyncio.Queue(_QUEUE)
        self._known: OrderedDict[Digest, None] = OrderedDict()
        """Keys that were read or written lately: they are not written again."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._write_all())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await cancelled(self._task)

    async def fill(self, sequence: Sequence, cached: int) -> int:
        """Fills the sequence's full pages after its first `cached` tokens, as far as they are found without a gap.

        Returns the tokens filled. The sequence must not be ready; the last token is always left to be computed."""
        page_tokens = self._core.pool.format.page_tokens
        first = cached // page_tokens
        keys = sequence.keys[first : (len(sequence.tokens) - 1) // page_tokens]
        ctx = _context(sequence)
        filled = 0
        for start in range(0, len(keys), _ASKED_AT_ONCE):
            asked = keys[start : start + _ASKED_AT_ONCE]
            values = await self._ring.get(
                "kv", [key.digest for key in asked], sequence.ticket.root, [_material(key) for key in asked], ctx
            )
            for key, value in zip(asked, values, strict=True):
                if value is None or not self._take(sequence.hold.pages[first + filled], value):
                    self._known.pop(key.digest, None)
                    return filled * page_tokens
                self._remember(key.digest)
                filled += 1
        return filled * page_tokens

    def keep(self, sequence: Sequence, cached: int) -> None:
        """Writes the full pages that were computed after the first `cached` tokens; later, and perhaps not at all."""
        page_tokens = self._core.pool.format.page_tokens
        full = len(sequence.ticket.tokens) // page_tokens
        computed = sequence.keys[cached // page_tokens : full]
        if self._fleet.live("cache") and any(key.digest not in self._known for key in computed):
            with contextlib.suppress(asyncio.QueueFull):
                self._queue.put_nowait((sequence.keys[:full], sequence.ticket.root, _context(sequence)))

    def _take(self, page: int, value: bytes) -> bool:
        try:
            import_page(self._core.pool, page, value)
        except Corrupt as error:
            log.warning("a cached page can't be used: %s", error.message)
            return False
        return True

    async def _write_all(self) -> None:
        while True:
            keys, root, ctx = await self._queue.get()
            await self._write(keys, root, ctx)

    async def _write(self, keys: tuple[PageKey, ...], root: Digest, ctx: RequestContext) -> None:
        hold = self._core.pages.hold()
        try:
            await self._core.call(lambda: hold.match(keys))
            for key, page in zip(keys, hold.pages, strict=False):
                if key.digest not in self._known:
                    self._remember(key.digest)
                    value = export_page(self._core.pool, page)
                    if not self._ring.put("kv", key.digest, root, _material(key), value, ctx, ttl_s=TTL_S):
                        self._known.pop(key.digest)
                        return
                    await asyncio.sleep(0)  # a page takes a while to copy: tokens go first
        finally:
            self._core.post(hold.release)

    def _remember(self, key: Digest) -> None:
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


def _material(key: PageKey) -> bytes:
    """What a hit is compared with: the page's tokens."""
    return struct.pack(f">{len(key.tokens)}I", *key.tokens)


def _context(sequence: Sequence) -> RequestContext:
    return RequestContext(sequence.deadline, sequence.ticket.request_id, sequence.ticket.tenant)
