"""One read of cached pages into a sequence, layer by layer, and when the rest of the sequence can begin beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TypeAlias

from pdbus.buffer import Buffer
from pdbus.engine.arriving import Arriving
from pdbus.engine.sequence import Sequence
from pdbus.errors import Cancelled
from pdbus.kv.codec import PagePool, import_layers
from pdbus.peers.cache_prefix import PrefixRead

Begin: TypeAlias = Callable[[int, Arriving], None]
"""Pages that will be there unless a node fails, and what tells how far they are."""

_SPARE = 2.0
"""So many times what the rest of a read should take is waited for it: meanwhile the engine does nothing else."""
_MOMENT_S = 0.05


class TierRead:
    """Of `pages` pages, from the sequence's page `first` on. `compute_s`: what the engine takes for the tokens that
    follow, if that is known.

    The engine can begin before all is there. So that it never waits, it does once the rest of the read takes no longer
    than its own way to the last layer: every layer then comes before it is needed."""

    def __init__(
        self, sequence: Sequence, pool: PagePool, first: int, pages: int, compute_s: float | None, begin: Begin
    ) -> None:
        page_format = pool.format
        self.into = PrefixRead(pages, page_format.page_bytes, page_format.layers, self._take, self._on_progress)
        self._sequence, self._pool, self._first, self._pages = sequence, pool, first, pages
        self._compute_s, self._begin = compute_s or 0.0, begin
        self._begun_s: float | None = None
        """When the first piece came."""
        self._arriving: Arriving | None = None

    def end(self) -> None:
        """Nothing more is read."""
        if self._arriving:
            self._arriving.fail()

    def _take(self, places: Many[int], layer: int, layers: int, body: Buffer) -> None:
        """A piece is written as it comes: the node cuts them so that each takes well below a millisecond."""
        pages = self._sequence.hold.pages
        if len(pages) < self._first + self._pages:
            raise Cancelled("the sequence has ended, and has no pages any more")
        chosen = [pages[self._first + place] for place in places]
        import_layers(self._pool, slice(layer, layer + layers), chosen, body)

    def _on_progress(self) -> None:
        there, now_s = self.into.parts_there, time.monotonic()
        if self._begun_s is None:
            self._begun_s = now_s
        if self._arriving:
            self._arriving.arrived(there)
        elif there:
            left_s = (now_s - self._begun_s) * (self.into.parts - there) / there
            if left_s <= self._compute_s:
                self._arriving = Arriving(_SPARE * left_s + _MOMENT_S)
                self._arriving.arrived(there)
                self._begin(self.into.expected, self._arriving)
