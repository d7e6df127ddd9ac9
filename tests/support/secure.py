"""A real NATS server that lets in only the users of `pdbus keys nats`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pdbus.bus.bus import Bus, connect
from pdbus.nats_access import NatsAccess
from pdbus.stack.nats_accounts import seed_path, write_accounts
from pdbus.stack.nats_server import embedded_nats


@dataclass
class SecureNats:
    url: str
    keys: Path

    def access(self, user: str) -> NatsAccess:
        return NatsAccess(seed=seed_path(self.keys, user))

    @asynccontextmanager
    async def bus(self, user: str) -> AsyncIterator[Bus]:
        async with connect(self.url, name=user, access=self.access(user)) as bus:
            yield bus


@asynccontextmanager
async def secure_nats(folder: Path, callers: Iterable[str] = ()) -> AsyncIterator[SecureNats]:
    write_accounts(folder / "keys", callers)
    async with embedded_nats(folder / "nats", keys=folder / "keys") as running:
        yield SecureNats(running.url, folder / "keys")
