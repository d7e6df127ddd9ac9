"""Processes of a measurement's own, beside or in the place of a stack's."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

END_S = 15.0
"""From SIGTERM to SIGKILL."""


@asynccontextmanager
async def process(
    arguments: Sequence[str], env: Mapping[str, str], lifeline: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python ARGUMENTS` with this environment; ends with the scope, or where the lifeline (a descriptor) breaks."""
    nothing = asyncio.subprocess.DEVNULL
    started = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=env, pass_fds=(lifeline,), stdin=nothing, stdout=nothing, stderr=nothing
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            with suppress(ProcessLookupError):
                started.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await started.wait()
        if started.returncode is None:
            started.kill()
        await started.wait()
