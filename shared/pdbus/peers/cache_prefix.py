"""The values of a prefix as they come from cache nodes, in pieces, and how far they are whole. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import TypeAlias

from pdbus.buffer import Buffer
from pdbus.errors import Corrupt

Take: TypeAlias = Callable[[Sequence[int], int, int, Buffer], None]
"""places, first part, parts, body: of the values at these places, one after the other, their parts from the first on.
The body is valid within the call only."""


class PrefixRead:
    """`keys` values of `value_bytes` bytes, each of `parts` equal parts, given to `take` piece by piece.

    `on_progress` is called after each piece."""

    def __init__(
        self, keys: int, value_bytes: int, parts: int, take: Take, on_progress: Callable[[], None] | None = None
    ) -> None:
        self.parts = parts
        self.on_disk = [False] * keys
        """By place: the node had it on its disk only."""
        self._part_bytes = value_bytes // parts
        self._came = [0] * keys
        """Parts of each, in order."""
        self._give, self._on_progress = take, on_progress
        self._promised = [False] * keys
        self._unheard = 0

    @property
    def whole(self) -> int:
        """Values from the first on, without a gap, that have come whole."""
        return sum(1 for _ in takewhile(lambda came: came == self.parts, self._came))

    def ask(self, nodes: int) -> None:
        """So many nodes are asked, and each that has some of the values will `promise` them."""
        self._unheard = nodes

    def promise(self, places: Iterable[int]) -> None:
        """A node has answered that it will send these."""
        self._unheard -= 1
        for place in places:
            self._promised[place] = True

    @property
    def expected(self) -> int:
        """Values from the first on, without a gap, that are promised; 0 as long as not all nodes have answered."""
        return 0 if self._unheard else sum(1 for _ in takewhile(bool, self._promised))

    @property
    def parts_there(self) -> int:
        """Parts that have come of every expected value."""
        return min(self._came[: self.expected], default=0)

    def take(self, places: Sequence[int], part: int, parts: int, body: Buffer) -> None:
        """Raises Corrupt where that isn't what comes next of these values."""
        fits = 0 < parts <= self.parts - part and len(body) == len(places) * parts * self._part_bytes
        if not fits or any(self._came[place] != part for place in places):
            raise Corrupt(f"a piece of {len(body)} bytes of cached values doesn't fit")
        self._give(places, part, parts, body)
        for place in places:
            self._came[place] += parts
        if self._on_progress:
            self._on_progress()
