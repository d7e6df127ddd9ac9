"""A prompt that this worker reads, for one of its jobs: what the tiers of the prefix cache have of it comes first, the
rest is computed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from pdbus.context import Deadline
from pdbus.engine.arriving import Arriving
from pdbus.engine.core import Core
from pdbus.engine.prefix_tier import PrefixTier
from pdbus.engine.sequence import Lower, Sequence, Started
from pdbus.engine.version import Version
from pdbus.kv.prefix import page_keys
from pdbus.messages.common import Ticket
from pdbus.telemetry import Phase, record_span


class Prompt:
    """Made and used in the event loop. `sequence` is the job's, to be discarded in the end.

    The order: `submit`, `admitted`, `fill`, then `read` once the engine has told of the first new token."""

    def __init__(
        self, core: Core, tier: PrefixTier, ticket: Ticket, version: Version, deadline: Deadline, *, handoff: bool
    ) -> None:
        """`handoff`: as of the sequence."""
        # A prompt's log-probabilities need every row computed: such a request neither uses nor fills a cache.
        scope = None if ticket.prompt_logprobs is not None else version.salted(ticket.salt)
        self.sequence = Sequence(
            ticket,
            version,
            deadline,
            core.pages.hold(ticket.tenant),
            handoff=handoff,
            keys=page_keys(ticket.tokens, scope) if scope else (),
            scope=None if handoff else scope,
            lower=_lower(core, version, ticket) if scope else (),
            ready=False,
        )
        self.taken_s = 0.0
        """From when all that is cached was in place to the first new token. Known once it is read."""
        self._core, self._tier = core, tier
        self._accepted_ns = time.time_ns()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started_ns = 0
        self._resumed_s = 0.0
        self._shared = self._filled = self._resumed = 0

    @property
    def cached(self) -> int:
        """Tokens whose KV came from some cache."""
        return self._shared + self._filled

    @property
    def resumed(self) -> int:
        """Tokens of which only the upper layers are computed here: what the lower ones made of them was kept."""
        return max(self._resumed - self.cached, 0)

    @property
    def cached_of_prompt(self) -> int:
        """Those of them that belong to the prompt, as the answer tells."""
        return min(self.cached, len(self.sequence.ticket.prompt))

    @property
    def computed(self) -> int:
        """Tokens that are computed here before the first new one."""
        return len(self.sequence.ticket.tokens) - self.cached

    def submit(self) -> None:
        """Hands the sequence to the engine. It needs no word from here before it computes where nothing can be read
        from the lower tiers, and nobody has to know first what was found."""
        if not self.sequence.handoff:
            keys = self.sequence.keys[: (len(self.sequence.tokens) - 1) // self._core.pool.format.page_tokens]
            self.sequence.ready = not self._tier.worth_asking(len(keys) - self._core.pages.matching(keys))
        self._core.submit(self.sequence)

    def started(self, event: Started) -> None:
        """The engine has told so."""
        if not self._started.done():
            self._started_ns, self._resumed_s = time.time_ns(), time.monotonic()
            self._shared, self._resumed = event.cached_tokens, event.resumed_tokens
            self._started.set_result(None)

    async def admitted(self, ended: asyncio.Future[None]) -> None:
        """Returns once the sequence has its pages. Raises what `ended` does, should it end before."""
        waits: list[asyncio.Future[Any]] = [self._started, ended]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
        record_span(Phase.QUEUE, self._accepted_ns, self._started_ns)

    async def fill(self) -> int:
        """Reads what the lower tiers have, and lets the engine compute the rest. Returns `cached`."""
        if not self.sequence.ready:
            filled = 0 if self.resumed else await self._fill_from_tiers()
            if filled != self._filled or not filled:
                self._filled, self._resumed_s = filled, time.monotonic()
            self._core.resume(self.sequence, self.cached)
        return self.cached

    async def _fill_from_tiers(self) -> int:
        decided = not self.sequence.handoff
        return await self._tier.fill(self.sequence, self._shared, self._begin, decided=decided)

    def _begin(self, filled: int, arriving: Arriving) -> None:
        """So many tokens are all but there: the rest can be computed meanwhile."""
        self._filled, self._resumed_s = filled, time.monotonic()
        self._core.resume_early(self.sequence, self.cached, arriving)

    def read(self) -> None:
        """All of it is computed: notes how long that took, and keeps its pages for others."""
        self.taken_s = time.monotonic() - self._resumed_s
        if not self.resumed:
            self._tier.rates.computed(self.computed, self.taken_s)
        self._tier.count(self._shared, self._filled, self.resumed, self.computed - self.resumed)
        attributes = {
            "gen_ai.usage.cache_read.input_tokens": self.cached,
            "pdbus.computed_tokens": self.computed,
            "pdbus.resumed_tokens": self.resumed,
        }
        record_span(Phase.PREFILL, self._started_ns, time.time_ns(), attributes=attributes)
        self._tier.keep(self.sequence, self._shared)


def _lower(core: Core, version: Version, ticket: Ticket) -> tuple[Lower, ...]:
    """Where the pool keeps what they need."""
    known = [(at, replace(scope, salt=ticket.salt)) for at, scope in version.lower if at in core.pool.streams.layers]
    return tuple(Lower(at, scope, page_keys(ticket.tokens, scope)) for at, scope in known)
