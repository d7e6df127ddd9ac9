"""Tasks end with their owner: cancelled, awaited, and heard of where one had failed."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self

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


class OwnTask(ABC):
    """While entered, `_run` goes on in a task of its own, which ends with the scope."""

    _task: asyncio.Task[None]

    @abstractmethod
    async def _run(self) -> None: ...

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await cancelled(self._task)
