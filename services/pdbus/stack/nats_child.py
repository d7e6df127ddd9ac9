"""The launcher's own NATS server: tied to the launcher's life, and started again on the same port when it dies."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pdbus.runtime.first import first
from pdbus.stack.child import STEADY_S, Inherited, backoff_s, how
from pdbus.stack.nats_server import EmbeddedNats, NatsServerError, embedded_nats


@asynccontextmanager
async def own_nats(
    data: Path,
    executable: Path | None,
    inherited: Inherited,
    on_start: Callable[[int], None],
    on_death: Callable[[str], None],
    keys: Path | None = None,
) -> AsyncIterator[str]:
    """Yields the URL, the same for as long as the scope lasts. Raises NatsServerError when the server can't be started.

    `keys` as for `embedded_nats`. `on_start` gets each process id, `on_death` is told how one ended unasked."""

    def server(port: int) -> AbstractAsyncContextManager[EmbeddedNats]:
        return embedded_nats(
            data,
            executable=executable,
            port=port,
            keys=keys,
            argv_prefix=(sys.executable, "-m", "pdbus.stack.tether", str(inherited.lifeline)),
            pass_fds=(inherited.lifeline, inherited.lock),
        )

    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stopping = asyncio.Event()

    async def keep_running() -> None:
        port, deaths = -1, 0
        while not stopping.is_set():
            started_s = time.monotonic()
            try:
                async with server(port) as running:
                    on_start(running.process.pid)
                    port = urlsplit(running.url).port or -1
                    if not started.done():
                        started.set_result(running.url)
                    await first(running.process.wait(), stopping.wait())
                problem = how(running.process.returncode or 0)
            except NatsServerError as error:
                if not started.done():
                    raise
                problem = error.message
            if not stopping.is_set():
                deaths = 1 if time.monotonic() - started_s > STEADY_S else deaths + 1
                on_death(problem)
                await first(asyncio.sleep(backoff_s(deaths)), stopping.wait())

    keeping = asyncio.create_task(keep_running())
    try:
        either: set[asyncio.Future[Any]] = {keeping, started}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            keeping.result()  # raises: it never got up
        yield started.result()
    finally:
        stopping.set()
        await keeping
