"""The lower tiers of the prefix cache, as workers use them: whole pages in cache nodes, shared by all workers.

Reading stands in a request's way, so it is done only where it is measured to be faster than computing. Writing never
does: pages that were used a second time are written soon, others while the engine has nothing to compute.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence as Many
from types import TracebackType
from typing import Self

from pdbus.bus.presence import Fleet
from pdbus.context import RequestContext
from pdbus.engine.core import Core
from pdbus.engine.rates import Rates
from pdbus.engine.sequence import Sequence
from pdbus.engine.write_back import WriteBack, material
from pdbus.errors import Corrupt
from pdbus.kv.codec import import_page
from pdbus.kv.prefix import PageKey
from pdbus.peers.cache import CacheRing
from pdbus.telemetry import meter

log = logging.getLogger(__name__)

_BATCH_BYTES = 4 << 20
"""Of one read: enough to make the round trip cheap, and little to lose with it."""
_AT_ONCE = 3
"""Reads under way for one prompt, after the first."""
_LONGEST_S = 2.0
"""For one read, before the worker knows how fast it computes."""


class PrefixTier:
    """Reads into the pages of sequences that are not ready, and writes pages back behind the requests."""

    def __init__(self, ring: CacheRing, fleet: Fleet, core: Core) -> None:
        page_format = core.pool.format
        self.rates = Rates(page_format.page_bytes, page_format.page_tokens)
        self._ring, self._fleet, self._core = ring, fleet, core
        self._page_tokens = page_format.page_tokens
        self._batch = max(_BATCH_BYTES // page_format.page_bytes, 1)
        self._write_back = WriteBack(ring, core)
        self._tokens = meter().create_counter("pdbus.prefix.tokens", unit="{token}")

    async def __aenter__(self) -> Self:
        await self._write_back.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._write_back.__aexit__(kind, error, trace)

    def worth_asking(self, pages: int) -> bool:
        """Whether to look for so many pages, or to compute them at once."""
        return bool(self._fleet.live("cache")) and self.rates.worth_asking(pages)

    async def fill(self, sequence: Sequence, cached: int, *, decided: bool = False) -> int:
        """Fills the sequence's full pages after its first `cached` tokens, as far as they are found without a gap and
        reading them pays.

        Returns the tokens filled. The sequence must not be ready; the last token is always left to be computed.
        `decided`: that it is worth asking has been found already."""
        first = cached // self._page_tokens
        keys = sequence.keys[first : (len(sequence.tokens) - 1) // self._page_tokens]
        if not keys or not (decided or self.worth_asking(len(keys))):
            return 0
        started_s = time.monotonic()
        filled = 0
        for start, end in self._rounds(len(keys)):
            batches = [keys[at : min(at + self._batch, end)] for at in range(start, end, self._batch)]
            values = [
                value for batch in await asyncio.gather(*(self._read(sequence, batch) for batch in batches))
                for value in batch
            ]  # fmt: skip
            taken = await self._take(sequence.hold.pages[first + start : first + end], values)
            self._write_back.remember(keys[start : start + taken])
            filled += taken
            if start + taken < end:
                self._write_back.forget(keys[start + taken : start + taken + 1])
                break
        taken_s = time.monotonic() - started_s
        if filled:
            self.rates.read(filled, taken_s)
        else:
            self.rates.missed(taken_s)
        return filled * self._page_tokens

    def count(self, own: int, read: int, computed: int) -> None:
        """A prompt's tokens by where their KV came from: this worker's own pages, cache nodes, or computed."""
        for source, tokens in (("worker", own), ("cache", read), ("computed", computed)):
            if tokens:
                self._tokens.add(tokens, {"source": source})

    def keep(self, sequence: Sequence, shared: int) -> None:
        """Writes the sequence's full pages, later and perhaps not at all. `shared`: tokens that it found in this
        worker's own pages, which are therefore in use by others too."""
        if not self._fleet.live("cache"):
            return
        full, pages = len(sequence.ticket.tokens) // self._page_tokens, shared // self._page_tokens
        ticket = sequence.ticket
        ctx = RequestContext(sequence.deadline, ticket.request_id, ticket.tenant)
        self._write_back.put(sequence.keys[:pages], ticket.root, ctx, hot=True)
        self._write_back.put(sequence.keys[pages:full], ticket.root, ctx, hot=False)

    def _rounds(self, pages: int) -> list[tuple[int, int]]:
        """Page ranges that are read one after another. The first is a single read: it tells whether there is any."""
        starts = [0, *range(self._batch, pages, self._batch * _AT_ONCE), pages]
        return [(start, end) for start, end in itertools.pairwise(starts) if start < end]

    async def _read(self, sequence: Sequence, keys: Many[PageKey]) -> list[bytes | None]:
        ticket = sequence.ticket
        return await self._ring.get(
            "kv",
            [key.digest for key in keys],
            ticket.root,
            [material(key) for key in keys],
            RequestContext(sequence.deadline, ticket.request_id, ticket.tenant),
            within_s=self.rates.patience_s(len(keys), _LONGEST_S),
        )

    async def _take(self, pages: Many[int], values: Many[bytes | None]) -> int:
        """Copies values into pages up to the first that is missing or doesn't fit; returns how many."""
        taken = 0
        for page, value in zip(pages, values, strict=False):  # a sequence that has ended has no pages any more
            if value is None:
                break
            try:
                import_page(self._core.pool, page, value)
            except Corrupt as error:
                log.warning("a cached page can't be used: %s", error.message)
                break
            taken += 1
            await asyncio.sleep(0)  # a page takes a while to copy: tokens go first
        return taken
