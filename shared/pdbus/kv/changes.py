"""What became findable in a page table and what no longer is, for whoever publishes it. No torch here.

The thread that owns the table notes; another one takes. Nobody waits for the other: a deque's ends are moved in one
step each, and what is lost for lack of room is known as lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pdbus.messages.common import Digest

MOST_CHANGES = 16_384
"""That wait to be taken. Beyond it the taker has to look at the whole table."""


class Changes:
    """`on_news` is called by the noting thread, once between two calls of `take`."""

    def __init__(self) -> None:
        self.on_news: Callable[[], None] = lambda: None
        self._noted: deque[tuple[Digest, bool]] = deque()
        self._lost = False
        self._told = False

    def note(self, key: Digest, present: bool) -> None:
        """By the owner of the table."""
        if len(self._noted) < MOST_CHANGES:
            self._noted.append((key, present))
        else:
            self._lost = True
        if not self._told:
            self._told = True
            self.on_news()

    def take(self) -> dict[Digest, bool] | None:
        """By the taker: the keys that changed and whether each is findable now; None where some were lost.

        After None the next changes are those made after a moment within this call."""
        self._told = False
        if self._lost:
            self._noted.clear()
            self._lost = False
            return None
        changed: dict[Digest, bool] = {}
        for _ in range(len(self._noted)):
            key, present = self._noted.popleft()
            changed[key] = present
        return changed
