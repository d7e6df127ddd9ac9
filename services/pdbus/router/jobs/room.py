"""When jobs may run: so many at once, and only while nobody who waits for an answer would notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdbus.router.admission import Admission

_LOOK_AGAIN_S = 0.05
"""While there is no room. What makes some (other requests that end, others that don't come) is told to nobody."""


class JobRoom:
    """Jobs come last: one begins while no request waits and half of the router's slots are free."""

    def __init__(self, admission: Admission, slots: int) -> None:
        self._admission = admission
        self._most_running = max(1, slots // 2)
        self._places = asyncio.Semaphore(max(1, slots // 8))

    async def free(self) -> None:
        """Returns while there is room."""
        while self._admission.waiting or self._admission.running >= self._most_running:  # noqa: ASYNC110 - as it says there
            await asyncio.sleep(_LOOK_AGAIN_S)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Held by a job while it is computed."""
        async with self._places:
            await self.free()
            yield
