"""Waiting for what no event tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Returns once `condition()` holds; raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  # it looks at the insides of things that tell nobody
            await asyncio.sleep(0.01)
