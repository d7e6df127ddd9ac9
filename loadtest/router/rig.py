"""Real routers on a real bus, with simulated workers in one process of their own, for a measurement."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.processes import END_S, process
from loadtest.tiny import tiny_checkpoint
from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.stack.launcher import lifeline_pipe
from pdbus.stack.nats_server import embedded_nats

MODEL = "simulated"
_READY_S = 120.0


@dataclass(frozen=True)
class Rig:
    urls: tuple[str, ...]
    """Of the routers."""
    nats_url: str
    stamps: Path
    """Where the workers write, when they end, at what moment each token left them (loadtest/router/workers.py)."""
    pids: Mapping[str, int]
    """Of all processes, this one included, by name."""
    _workers: asyncio.subprocess.Process

    async def end(self) -> None:
        """Ends the workers, so that their stamps are there."""
        self._workers.terminate()
        async with asyncio.timeout(END_S):
            await self._workers.wait()


@asynccontextmanager
async def rig(
    routers: int, step_s: float = 0.0, cache_nodes: int = 0, env: Mapping[str, str] | None = None
) -> AsyncIterator[Rig]:
    """Yields when every router serves. What was started ends with the scope, or with this process.

    `env`: further settings of all of them."""
    async with AsyncExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="pdbus-load-", ignore_cleanup_errors=True))
        )
        lifeline = stack.enter_context(lifeline_pipe())
        nats = await stack.enter_async_context(embedded_nats(folder / "nats"))
        checkpoint = tiny_checkpoint(folder / "model")
        common = {
            "NATS_URL": nats.url,
            "PDBUS_MODEL": MODEL,
            "PDBUS_LIFELINE_FD": str(lifeline),
            "PDBUS_HTTP_PORT": "0",
            **(env or {}),
        }
        stamps = folder / "stamps.json"
        pids = {"nats": nats.process.pid, "generator": os.getpid()}

        async def start(id: str, arguments: Sequence[str], **more: str) -> asyncio.subprocess.Process:
            env = {**os.environ, **common, "PDBUS_ID": id, "PDBUS_DATA": str(folder / id), **more}
            started = await stack.enter_async_context(process(arguments, env, lifeline))
            pids[id] = started.pid
            return started

        await start("param-server-1", ["-m", "pdbus.param_server"], PDBUS_CHECKPOINT=str(checkpoint))
        for number in range(cache_nodes):
            await start(f"cache-{number}", ["-m", "pdbus.cache"])
        for number in range(routers):
            await start(f"router-{number}", ["-m", "pdbus.router"])
        workers = await start(
            "workers", ["-m", "loadtest.router.workers", "--step-s", str(step_s), "--stamps", str(stamps)]
        )
        urls = await _urls(nats.url, routers, cache_nodes)
        yield Rig(urls, nats.url, stamps, pids, workers)


async def _urls(nats_url: str, routers: int, cache_nodes: int) -> tuple[str, ...]:
    """Raises DeadlineExceeded where the routers, or the cache nodes, don't become ready."""
    async with connect(nats_url, name="loadtest") as bus, Fleet(bus) as fleet:

        def ready(known: Fleet) -> list[str]:
            return [card.url for card in known.live("router") if card.state == "ready" and card.url]

        def complete(known: Fleet) -> bool:
            nodes = sum(card.state == "ready" for card in known.live("cache"))
            return len(ready(known)) == routers and nodes == cache_nodes

        await fleet.wait_for(complete, Deadline.after(_READY_S))
        return tuple(sorted(ready(fleet)))
