"""The lower tiers of the prefix cache, as workers use them: whole pages in cache nodes, shared by all workers.

Reading stands in a request's way, so it is done only where it is measured to be faster than computing. Writing never
does: pages that were used a second time are written soon, others while the engine has nothing to compute.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from types import TracebackType
from typing import Self

from pdbus.bus.presence import Fleet
from pdbus.context import RequestContext
from pdbus.engine.arriving import Arriving
from pdbus.engine.core import Core
from pdbus.engine.rates import Rates
from pdbus.engine.sequence import Sequence
from pdbus.engine.tier_read import Begin, TierRead
from pdbus.engine.write_back import WriteBack, material
from pdbus.kv.prefix import PageKey
from pdbus.peers.cache import CacheRing
from pdbus.telemetry import meter

_MOST_PAGES = 512
"""Of one read."""
_LONGEST_S = 2.0
"""For one read, before the worker knows how fast it computes."""


class PrefixTier:
    """Reads into the pages of sequences that are not ready, and writes pages back behind the requests."""

    def __init__(self, ring: CacheRing, fleet: Fleet, core: Core) -> None:
        page_format = core.pool.format
        self.rates = Rates(page_format.page_bytes, page_format.page_tokens)
        self._ring, self._fleet, self._core = ring, fleet, core
        self._page_tokens = page_format.page_tokens
        self._write_back = WriteBack(ring, core)
        self._tokens = meter().create_counter("pdbus.prefix.tokens", unit="{token}")

    @property
    def to_write(self) -> int:
        """Pages that wait for their turn to be written to the nodes; they are not held for it."""
        return self._write_back.waiting

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

    async def fill(self, sequence: Sequence, cached: int, begin: Begin, *, decided: bool = False) -> int:
        """Fills the sequence's full pages after its first `cached` tokens, as far as they are found without a gap and
        reading them pays.

        Returns the tokens filled. The sequence must not be ready; the last token is always left to be computed.
        `begin` is called at most once, where computing the rest can begin already: with what will be returned, unless
        a node fails. `decided`: that it is worth asking has been found already."""
        first = cached // self._page_tokens
        keys = sequence.keys[first : (len(sequence.tokens) - 1) // self._page_tokens]
        if not keys or not (decided or self.worth_asking(len(keys))):
            return 0
        started_s = time.monotonic()
        filled = 0
        for start in range(0, len(keys), _MOST_PAGES):
            asked = keys[start : start + _MOST_PAGES]

            def begin_after(pages: int, arriving: Arriving, before: int = start, most: int = len(asked)) -> None:
                if pages < most or before + most == len(keys):  # else there may be more
                    begin((before + pages) * self._page_tokens, arriving)

            read = await self._read(sequence, first + start, asked, begin_after)
            self._write_back.remember(asked[:read])
            filled += read
            if read < len(asked):
                self._write_back.forget(asked[read : read + 1])
                break
        taken_s = time.monotonic() - started_s
        if filled:
            self.rates.read(filled, taken_s)
        else:
            self.rates.missed(taken_s)
        return filled * self._page_tokens

    def count(self, own: int, read: int, resumed: int, computed: int) -> None:
        """A prompt's tokens by where their KV came from: this worker's own pages, cache nodes, its own pages up to some
        layer, or computed."""
        for source, tokens in (("worker", own), ("cache", read), ("resumed", resumed), ("computed", computed)):
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

    def snapshot(self, sequence: Sequence) -> None:
        """Writes the full pages of an answer that goes on, soon: who continues it elsewhere will find them."""
        ticket = sequence.ticket
        if self._fleet.live("cache"):
            ctx = RequestContext(sequence.deadline, ticket.request_id, ticket.tenant)
            self._write_back.snapshot(sequence.keys[: sequence.published], ticket.root, ctx)

    async def _read(self, sequence: Sequence, first: int, keys: Many[PageKey], begin: Begin) -> int:
        """Reads into the sequence's pages from its page `first` on; returns how many came whole without a gap."""
        ticket = sequence.ticket
        rest = len(sequence.tokens) - (first + len(keys)) * self._page_tokens
        read = TierRead(sequence, self._core.pool, first, len(keys), self.rates.compute_s(rest), begin)
        try:
            return await self._ring.read_prefix(
                [key.digest for key in keys],
                ticket.root,
                [material(key) for key in keys],
                read.into,
                RequestContext(sequence.deadline, ticket.request_id, ticket.tenant),
                within_s=self.rates.patience_s(len(keys), _LONGEST_S),
            )
        finally:
            read.end()
