"""Waiting for a state that nothing announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(predicate: Callable[[], bool], within_s: float = 100.0) -> None:
    """Returns once `predicate()` holds; raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
