"""Requests that nobody can answer in time."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from pdbus.errors import DeadlineExceeded


async def late(reason: str, ask: Callable[[float], Awaitable[object]]) -> None:
    """Raises unless `ask(within_s)` runs into its deadline and says why, by a regular expression.

    That needs the time for an answer that says why: the deadlines grow until a busy machine has it, too."""
    within_s = 0.3
    while True:
        try:
            found = await ask(within_s)
        except DeadlineExceeded as error:
            if re.search(reason, error.message):
                return
            if within_s > 30:
                raise
        else:
            raise AssertionError(f"it was answered: {found}")
        within_s *= 3
