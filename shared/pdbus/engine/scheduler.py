"""What the engine computes next. No torch and no clock of its own; the engine's thread alone calls it.

A sequence is in exactly one of three places:

    waiting  admitted as the tenants share the worker (engine/tenants.py), else in order of arrival, once there is room
             and its pages can be had (if it doesn't bring them along).
    running  owns the pages of all its known tokens. Takes part in steps while it is `ready`.

    preempted  owns no pages: others needed them to grow (engine/preemption.py). Comes back before new prompts are
             admitted that want pages, unless they are of a higher priority or of a tenant below its share.

A step computes one token of every sequence that continues its answer, and chunks of those that still read their
prompt, under a token budget (engine/pace.py). A chunk ends at a page boundary or at the end of the known tokens, unless
less than a page is left for those who flood the step (engine/chunks.py).

A sequence whose next page is being computed by a running one stays waiting until that page is published, then shares
it: choices of one request and prompts with a common beginning compute it once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TypeAlias

from pdbus.engine.chunks import Chunk, Turn, chunks_of, passes_of
from pdbus.engine.pace import Pace
from pdbus.engine.preemption import Preemption, Swap
from pdbus.engine.publishing import Publishing
from pdbus.engine.sequence import Sequence
from pdbus.engine.sharing import match_lower, shareable
from pdbus.engine.tenants import Tenants, tenant_of
from pdbus.errors import DeadlineExceeded, Overloaded, PdbusError, TooLarge
from pdbus.kv.pages import PageTable
from pdbus.messages.common import Digest

CopyBelow: TypeAlias = Callable[[int, Many[int], Many[int]], None]
"""(layer, source pages, target pages)."""


@dataclass(frozen=True, slots=True)
class Limits:
    page_tokens: int
    chunk_tokens: int
    """Prompt tokens in one step, over all sequences; at least a page."""
    running: int
    """Sequences in steps at once."""


class Scheduler:
    def __init__(
        self, pages: PageTable, limits: Limits, swap: Swap | None = None, copy_below: CopyBelow | None = None
    ) -> None:
        """`copy_below`: of the pool (kv/codec.py)."""
        if limits.chunk_tokens < limits.page_tokens:
            raise ValueError(f"a chunk of {limits.chunk_tokens} tokens is less than a page of {limits.page_tokens}")
        self.pages = pages
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of admission: the last one is the youngest."""
        self.publishing = Publishing(pages, limits.page_tokens)
        self._copy_below = copy_below
        self._tenants = Tenants(limits.running)
        self._preemption = Preemption(pages, limits.page_tokens, swap, self._tenants)
        self._pace = Pace(limits.page_tokens, limits.chunk_tokens)
        self._turns = 0
        self._admitted = 0

    @property
    def step_s(self) -> float:
        """What one token of each running answer takes lately; 0 where that isn't known."""
        return self._pace.answers_s

    @property
    def preempted(self) -> list[Sequence]:
        return self._preemption.sequences

    @property
    def all(self) -> list[Sequence]:
        return [*self.running, *self.preempted, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        """It waits for its turn; with pages of its own, if it came with some, else for pages too."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Forgets it; False where it isn't here. Its pages stay with its hold."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.publishing.stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return self._preemption.remove(sequence)
        return True

    def turn(self, now_s: float) -> Turn:
        """Decides the next round. What failed is already removed; its pages are still its own, except a victim's."""
        self._turns += 1
        self._tenants.look(self.all, self._turns, now_s)
        failed = self._expire(now_s)
        self._preemption.bring_back(self.running, self.limits.running)
        started = self._admit(failed)
        failed += self._grow()
        chunks = chunks_of(self.running, self._pace, self.limits.page_tokens, self._turns, self._tenants)
        return Turn(tuple(started), tuple(failed), passes_of(chunks))

    def computed(self, chunk: Chunk) -> None:
        """Notes that a chunk is in its pages, and publishes the pages that it filled."""
        chunk.sequence.computed += chunk.tokens
        self._tenants.computed(chunk.sequence, chunk.tokens)
        self.publishing.publish(chunk.sequence)

    def took(self, turn: Turn, taken_s: float) -> None:
        """A turn was computed, in this time."""
        if any(chunk.first_layer for group in turn.groups for chunk in group):
            return  # its tokens cost less than others
        chunks = [chunk.tokens for group in turn.groups for chunk in group]
        self._pace.took(chunks.count(1), sum(tokens for tokens in chunks if tokens > 1), taken_s)

    def drop_root(self, kv_root: Digest) -> int:
        """Drops all pages made from it, and publishes none of those that running sequences still compute."""
        for sequence in self.all:
            if sequence.version.scope.kv_root == kv_root:
                self.publishing.stop(sequence)
        return self.pages.drop_root(kv_root)

    def _expire(self, now_s: float) -> list[tuple[Sequence, PdbusError]]:
        late = [one for one in self.all if one.deadline.at_monotonic_s <= now_s]
        for sequence in late:
            self.remove(sequence)
        return [(sequence, DeadlineExceeded("the deadline passed while the answer was computed")) for sequence in late]

    def _admit(self, failed: list[tuple[Sequence, PdbusError]]) -> list[Sequence]:
        started: list[Sequence] = []
        held_up = False
        for sequence in self._tenants.first(self.waiting):
            if not self._tenants.may_start(sequence, self.running):
                continue
            if not sequence.hold.pages:
                wanted = -(-len(sequence.tokens) // self.limits.page_tokens)
                if wanted > self.pages.total:
                    self.waiting.remove(sequence)
                    many = f"{len(sequence.tokens)} tokens are more than this worker's KV pool holds"
                    failed.append((sequence, TooLarge(many)))
                    continue
                if held_up or self.publishing.soon(sequence):
                    continue
                missing = wanted - self.pages.matching(shareable(sequence, self.limits.page_tokens))
                tenant, priority = tenant_of(sequence), sequence.ticket.priority
                room = self.make_room(tenant, priority, missing, interrupted=sequence.interrupted)
                if not room or not self._take_pages(sequence, wanted):
                    held_up = True  # those behind it that want pages wait too: a large prompt must not starve
                    continue
            self._start(sequence)
            started.append(sequence)
        return started

    def _start(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._admitted += 1
        sequence.admitted, sequence.served = self._admitted, self._turns
        self.publishing.publish(sequence)  # the pages that it brought along

    def _take_pages(self, sequence: Sequence, wanted: int) -> bool:
        hold = self.pages.hold(tenant_of(sequence))
        shared = hold.match(shareable(sequence, self.limits.page_tokens))
        if not self.can_allocate(wanted - shared):
            hold.release()
            return False
        with self.pages.hold() as sources:
            layer = 0
            if self._copy_below:
                layer = match_lower(sequence, self.pages, self.limits.page_tokens, shared, sources)
            if not self.can_allocate(wanted - shared):
                sources.release()  # there is no room for them beside what is copied from them
            new = hold.allocate(wanted - shared)
            if sources.pages and self._copy_below:
                self._copy_below(layer, sources.pages, new[: len(sources.pages)])
            sequence.resume_layer = layer
            sequence.resumed = (shared + len(sources.pages)) * self.limits.page_tokens if sources.pages else 0
        sequence.hold = hold
        sequence.computed = sequence.came = shared * self.limits.page_tokens
        sequence.published = shared
        self.publishing.begin(sequence)
        return True

    def _grow(self) -> list[tuple[Sequence, PdbusError]]:
        """Gives each running sequence the page that its next token needs. Where there is none one waits for better
        times (engine/preemption.py), or fails if its KV can't be kept until then."""
        victims: list[tuple[Sequence, PdbusError]] = []
        for sequence in list(self.running):
            while sequence in self.running and self._lacks_page(sequence):
                if self.pages.can_allocate(1):
                    sequence.hold.allocate(1)
                    continue
                if not self._preempt():
                    ready = [one for one in self.running if one.ready]
                    victims.append(self._give_up(self._tenants.gives_way(ready, self.pages.held)))
        return victims + [self._give_up(one) for one in self._preemption.hopeless()]

    def _give_up(self, victim: Sequence) -> tuple[Sequence, PdbusError]:
        self.remove(victim)
        victim.hold.release()
        return victim, Overloaded("no KV pages are left for this answer to grow")

    def _preempt(self, for_new: int | None = None) -> bool:
        if preempted := self._preemption.preempt(self.running, for_new):
            self.running.remove(preempted)
            self.publishing.stop(preempted)
        return preempted is not None

    def can_allocate(self, pages: int) -> bool:
        """Beside one for each running answer, which may want it in this very turn."""
        return self.pages.can_allocate(pages + sum(not one.handoff for one in self.running))

    def make_room(self, tenant: str, priority: int, wanted: int, *, interrupted: bool = False) -> bool:
        """Whether a new sequence may have so many pages, if they are free: not before preempted ones of its priority
        have theirs back, unless its tenant holds less than its share, or it is `interrupted`, for whose next token
        somebody waits as for theirs. Who is of a lower priority gives way to it, and below its share who is of the
        same; but nobody where all of them together hold too little."""
        below = self._tenants.below_share(tenant, wanted, self.pages)
        if not below and not interrupted and any(one.ticket.priority >= priority for one in self.preempted):
            return False
        most_priority = priority if below else priority - 1
        able = self._preemption.able(self.running, most_priority)
        if self.can_allocate(wanted - sum(len(one.hold.pages) + 1 for one in able)):  # beside theirs, that of each step
            while not self.can_allocate(wanted) and self._preempt(most_priority):
                pass
        return True

    def _lacks_page(self, sequence: Sequence) -> bool:
        return len(sequence.hold.pages) * self.limits.page_tokens < len(sequence.tokens)
