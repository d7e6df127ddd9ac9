"""One choice of a request: attempts, each with what was delivered before as a forced prefix, until the answer is whole.

So every token reaches the output once and in order, also when workers die in between.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from opentelemetry.trace import Status, StatusCode
from opentelemetry.util.types import AttributeValue

from pdbus.backoff import backoff_s
from pdbus.bus.bus import Bus
from pdbus.context import RequestContext
from pdbus.errors import (
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
    PdbusError,
    RootGone,
    Unauthorized,
    Unavailable,
)
from pdbus.kv.format import PAGE_TOKENS
from pdbus.messages.common import Digest, Ticket
from pdbus.router.attempt import Attempt, Moved
from pdbus.router.deaths import Deaths
from pdbus.router.output import ChoiceOutput
from pdbus.router.placement import Kind, Pair, Wanted
from pdbus.router.prefixes import PrefixKeys
from pdbus.router.tokens import TokenHub
from pdbus.router.version import Version

NO_WORKER_S = 10.0
"""How long a request waits for its first workers; for later ones, once it has begun, it waits to its deadline."""
_MOST_INTERNAL = 3
_MOST_AVOIDED = 8
_FINAL = (InvalidRequest, Unauthorized, Forbidden, NotFound)
"""Another worker would say the same. (RootGone is a NotFound, but another may have a version that exists.)"""


@dataclass(slots=True)
class Generation:
    """What one choice needs to be generated."""

    ticket: Ticket
    """Of the first attempt."""
    output: ChoiceOutput
    version: Version
    prefer_class: str | None
    hub: TokenHub
    bus: Bus
    ctx: RequestContext
    rng: random.Random
    exists: Callable[[Digest], bool]
    """Whether the log still has that version."""
    attempts: int = 0
    one_class: bool = True
    """All attempts ran in the compute class that was wanted: the answer may be cached under it."""

    async def run(self) -> None:
        """Returns when the output has the whole answer. Raises what can't be retried, or DeadlineExceeded."""
        if self.ticket.max_tokens == 0 and self.ticket.prompt_logprobs is None:  # an echo, and nothing to compute
            self.output.add((), (), "length")
            return
        retries = internal = 0
        deaths = Deaths(self.hub.workers.gone)
        self.hub.retries.asked()
        failed: dict[str, PdbusError] = {}  # of late, by worker
        moved: Moved | None = None
        while True:
            pair = (self._moved_pair(moved.to) if moved else None) or await self._pair(failed)
            moved = None
            ticket = self._next_ticket()
            attempt = Attempt(ticket, pair, self.output, self.bus, self.ctx)
            try:
                await self._try(attempt)
                return
            except PdbusError as error:
                if isinstance(error, Moved) and len(self.output.ids) > len(ticket.delivered):
                    moved = error  # no failure, and no other way to go round in circles than by making progress
                    continue
                internal += type(error) is PdbusError
                elsewhere = isinstance(error, RootGone) and self.exists(self.ticket.root)
                if (isinstance(error, _FINAL) and not elsewhere) or internal >= _MOST_INTERNAL:
                    raise
                if len(self.output.ids) > len(ticket.delivered):
                    deaths.forget()
                elif attempt.death:
                    deaths.add(*attempt.death, error.message)
                self.ctx.deadline.check(f"another worker could take over ({error.message})")
                if attempt.failed and len(failed) < _MOST_AVOIDED:
                    failed[attempt.failed] = error
                else:
                    failed.clear()
                failure = error
            await self._back_off(retries, failure)
            retries += 1

    async def _try(self, attempt: Attempt) -> None:
        pair = attempt.pair
        attributes: dict[str, AttributeValue] = {
            "pdbus.attempt": attempt.ticket.attempt,
            "pdbus.choice": attempt.ticket.choice,
            "pdbus.decode_worker": pair.decode,
            "pdbus.delivered_tokens": len(attempt.ticket.delivered),
            "pdbus.matched_tokens": pair.matched_tokens,
        }
        if pair.prefill is not None:
            attributes["pdbus.prefill_worker"] = pair.prefill
        self.hub.metrics.placed(pair)
        outcome = "cancelled"
        with self.hub.metrics.span("attempt", attributes, record_exception=False) as span:
            try:
                await attempt.run(self.hub)
                outcome = "finished"
            except Moved:
                outcome = "moved"
                raise
            except PdbusError as error:
                outcome = error.code
                span.set_status(Status(StatusCode.ERROR, error.message))
                raise
            finally:
                self.hub.metrics.attempt(outcome)

    def _next_ticket(self) -> Ticket:
        """The first attempt's ticket; later ones go on from what is delivered."""
        self.attempts += 1
        if self.attempts == 1:
            return self.ticket
        prompt_logprobs = None if self.output.prompt_known else self.ticket.prompt_logprobs
        delivered = tuple(self.output.ids)
        return replace(self.ticket, attempt=self.attempts, delivered=delivered, prompt_logprobs=prompt_logprobs)

    def _moved_pair(self, decode: str) -> Pair | None:
        """That worker alone, if it can go on with the answer."""
        tokens = len(self.ticket.prompt) + len(self.output.ids)
        pair = self.hub.workers.alone(decode, self.ticket.root, tokens)
        return pair if pair and pair.compute_class == self.prefer_class else None

    async def _pair(self, failed: Mapping[str, PdbusError]) -> Pair:
        workers, root = self.hub.workers, self.ticket.root
        wanted = self._wanted(failed)

        def choose() -> Pair | None:
            return workers.pair(root, wanted)

        deadline = self.ctx.deadline if self.attempts else self.ctx.deadline.within(NO_WORKER_S)
        pair = choose()
        if pair is None:
            try:
                await workers.fleet.wait_for(lambda _: choose() is not None or not self.exists(root), deadline)
            except (DeadlineExceeded, TimeoutError):
                self.ctx.deadline.check("a worker was there")
            pair = choose()
        if pair is None and not self.exists(root):
            raise RootGone(f"version {root.hex()[:12]} was given up, and no worker has it any more")
        if pair is None:
            raise Unavailable("no worker serves this version", retry_after_s=2.0)
        self.one_class &= pair.compute_class == self.prefer_class
        return pair

    def _wanted(self, failed: Mapping[str, PdbusError]) -> Wanted:
        tokens = self.ticket.prompt + tuple(self.output.ids)

        def keys(kind: Kind) -> PrefixKeys:
            return self.version.prefix_keys(tokens, kind, self.ticket.salt)

        return Wanted(
            len(tokens),
            keys,
            pages=-(-(len(tokens) + 1) // PAGE_TOKENS),
            shares=self.ticket.prompt_logprobs is None or self.output.prompt_known,
            prefer_class=self.prefer_class,
            avoid=frozenset(failed),
            broken=frozenset(worker for worker, error in failed.items() if not isinstance(error, Overloaded)),
        )

    async def _back_off(self, retries: int, failure: PdbusError) -> None:
        """The first time at once: another worker is likely to be well."""
        wait_s = self.hub.retries.take(time.monotonic())
        if retries:
            wait_s += max(backoff_s(retries, self.rng), min(failure.retry_after_s or 0.0, 1.0) * self.rng.random())
        if wait_s >= self.ctx.deadline.remaining_s:
            self.hub.retries.put_back()
            raise DeadlineExceeded(f"no time is left for another attempt ({failure.message})")
        await asyncio.sleep(wait_s)
