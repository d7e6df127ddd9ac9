"""How the commands reach a running stack."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdbus.bus.bus import Bus, connect
from pdbus.errors import NotFound
from pdbus.nats_access import NatsAccess
from pdbus.stack.folder import Folder
from pdbus.stack.nats_accounts import seed_path
from pdbus.stack.settings import StackSettings

_CONNECT_S = 10.0


@dataclass(frozen=True)
class Target:
    """A stack to talk to."""

    nats_url: str
    model: str
    access: NatsAccess = field(default_factory=NatsAccess)


def find(data: Path | None, settings: StackSettings) -> Target:
    """The NATS server that was named, else the one of the stack on the data folder. Raises NotFound without either.

    The settings' model and key count where the data folder's stack does not know better."""
    nats_url, model, access = settings.nats_url, settings.model, settings.nats_access
    folder = Folder(data)
    run = folder.running()
    if nats_url:
        return Target(nats_url, run.model if run and run.nats_url == nats_url else model, access)
    if run is None or not run.nats_url:
        raise NotFound(f"nothing runs on {folder.path}: start it with `pdbus up`, or set NATS_URL to a running server")
    if run.secure and access == NatsAccess():
        access = replace(access, seed=seed_path(folder.nats_keys, "operator"))
    return Target(run.nats_url, run.model, access)


@asynccontextmanager
async def attached(target: Target) -> AsyncIterator[Bus]:
    """A bus on the stack. Raises Unavailable when its NATS server does not answer."""
    async with connect(target.nats_url, name="pdbus", wait_s=_CONNECT_S, access=target.access) as bus:
        yield bus
