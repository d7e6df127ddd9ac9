"""Whether workers die of a request: then no other is to be given it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pdbus.errors import PdbusError

MOST_DEATHS: Final = 5
"""Of workers in the middle of a request, without one more token in between."""


class Deadly(PdbusError):
    """Workers die of the request. Internal, and never tried again."""


class Deaths:
    """Of workers that computed one choice of a request."""

    def __init__(self, gone: Callable[[str, str], bool]) -> None:
        """`gone`: whether that incarnation of a worker is."""
        self._gone = gone
        self._seen: list[tuple[str, str]] = []

    def forget(self) -> None:
        """The answer has come further."""
        self._seen.clear()

    def add(self, worker: str, incarnation: str, why: str) -> None:
        """It is not heard of any more. Raises Deadly once there are too many.

        One that was only stopped, or not heard while this router itself was late, has come back by then: it counts no
        longer."""
        last = worker, incarnation
        self._seen.append(last)
        if len(self._seen) >= MOST_DEATHS:
            self._seen = [death for death in self._seen if death is last or self._gone(*death)]
        if len(self._seen) >= MOST_DEATHS:
            raise Deadly(f"{MOST_DEATHS} workers ended while they computed this ({why})")
