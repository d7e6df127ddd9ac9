"""How the commands reach a running stack."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pdbus.bus.bus import Bus, connect
from pdbus.errors import NotFound
from pdbus.stack.folder import Folder

_CONNECT_S = 3.0


@dataclass(frozen=True)
class Target:
    """A stack to talk to."""

    nats_url: str
    model: str


def find(data: Path | None, nats_url: str, model: str) -> Target:
    """The NATS server that was named, else the one of the stack on the data folder. Raises NotFound without either.

    `model`: what the settings say; the data folder's stack knows better."""
    folder = Folder(data)
    run = folder.running()
    if nats_url:
        return Target(nats_url, run.model if run and run.nats_url == nats_url else model)
    if run is None or not run.nats_url:
        raise NotFound(f"nothing runs on {folder.path}: start it with `pdbus up`, or set NATS_URL to a running server")
    return Target(run.nats_url, run.model)


@asynccontextmanager
async def attached(target: Target) -> AsyncIterator[Bus]:
    """A bus on the stack. Raises Unavailable when its NATS server does not answer."""
    async with connect(target.nats_url, name="pdbus", wait_s=_CONNECT_S) as bus:
        yield bus
