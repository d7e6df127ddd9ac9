"""Who gives its pages up when they run out, and when it gets them back. Pure: the copying is behind `Swap`.

A preempted sequence owns no pages; its KV is kept elsewhere and comes back without being computed again. Of the lowest
priority the youngest of the tenant that holds most goes first, and of the highest one the oldest comes back first.
While any is away, only an interrupted answer, a tenant below its share or a higher priority gets new pages, so all get
on.
"""

from __future__ import annotations

from typing import Protocol

from pdbus.context import HIGHEST_PRIORITY
from pdbus.engine.sequence import Sequence
from pdbus.engine.tenants import Tenants, tenant_of
from pdbus.kv.pages import PageTable


class Swap(Protocol):
    """Keeps the KV of preempted sequences: engine/swap.py, and a plain one in tests."""

    def save(self, sequence: Sequence) -> bool:
        """Copies what is computed out of the sequence's pages. False where there is no room for it."""

    def ready(self, sequence: Sequence) -> bool:
        """Whether it can be restored at once; if not, it is being brought for that."""

    def restore(self, sequence: Sequence) -> None:
        """Copies what was saved into the sequence's pages, and lets go of it."""

    def drop(self, sequence: Sequence) -> None:
        """It is not wanted any more."""


class Preemption:
    """The preempted sequences of one scheduler. Without a `swap` there never are any."""

    def __init__(self, pages: PageTable, page_tokens: int, swap: Swap | None, tenants: Tenants) -> None:
        self.sequences: list[Sequence] = []
        """In the order in which they come back."""
        self._pages, self._page_tokens, self._swap, self._tenants = pages, page_tokens, swap, tenants

    def able(self, running: list[Sequence], most_priority: int) -> list[Sequence]:
        """Those of `running` that can give way, of this priority at most. One that hands its pages over, or is still
        being filled, can't let go of them."""
        if not self._swap:
            return []
        able = [one for one in running if one.ready and not one.handoff and not one.cancelled]
        return [one for one in able if one.ticket.priority <= most_priority]

    def preempt(self, running: list[Sequence], for_new: int | None = None) -> Sequence | None:
        """Frees the pages of one of `running` whose KV can be kept; None where nothing is won by it. `for_new`: one of
        this priority at most, for a new sequence; else for one of them to grow."""
        able = self.able(running, HIGHEST_PRIORITY if for_new is None else for_new)
        if not self._swap or not able:
            return None
        victim = self._tenants.gives_way(able, self._pages.held)
        alone = self._pages.used <= len(victim.hold.pages)  # then nobody will ever give a page back
        if (alone and for_new is None) or not self._swap.save(victim):
            return None
        victim.hold.release()
        victim.resumed = 0  # only what is computed whole was kept
        self.sequences.append(victim)
        self.sequences.sort(key=lambda one: (-one.ticket.priority, one.admitted))
        return victim

    def bring_back(self, running: list[Sequence], most: int) -> None:
        """Moves sequences back to `running`, up to `most` there: in their order, and only where each running one can
        still grow by a page, or the next turn would preempt again."""
        while self._swap and self.sequences and len(running) < most:
            sequence = self.sequences[0]
            wanted = self.pages_of(sequence)
            if not self._pages.can_allocate(wanted + len(running)) or not self._swap.ready(sequence):
                return
            sequence.hold = self._pages.hold(tenant_of(sequence))
            sequence.hold.allocate(wanted)
            self._swap.restore(sequence)
            self.sequences.remove(sequence)
            running.append(sequence)
            running.sort(key=lambda one: one.admitted)

    def hopeless(self) -> list[Sequence]:
        """Those that have outgrown the pool."""
        return [one for one in self.sequences if self.pages_of(one) > self._pages.total]

    def remove(self, sequence: Sequence) -> bool:
        """Forgets it; False where it isn't here."""
        if not self._swap or sequence not in self.sequences:
            return False
        self.sequences.remove(sequence)
        self._swap.drop(sequence)
        return True

    def pages_of(self, sequence: Sequence) -> int:
        """Pages that it needs to go on."""
        return -(-len(sequence.tokens) // self._page_tokens)
