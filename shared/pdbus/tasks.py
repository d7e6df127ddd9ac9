"""Tasks end with their owner: cancelled, awaited, and heard of where one had failed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

log = logging.getLogger(__name__)


async def cancelled(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancels the tasks and returns when all have ended. What one of them failed with is logged, not raised."""
    begun = [task for task in tasks if task is not None]
    if not begun:
        return
    for task in begun:
        task.cancel()
    for outcome in await asyncio.gather(*begun, return_exceptions=True):
        if isinstance(outcome, Exception):
            log.error("a task had failed before its owner ended it", exc_info=outcome)
