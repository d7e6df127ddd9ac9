"""Param-servers in the test's process, on a real bus, with the cards that the runtime would publish for them; and a
reader of their versions."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from pdbus.bus.bus import connect
from pdbus.bus.presence import Presence
from pdbus.context import Deadline, RequestContext
from pdbus.messages.presence import Card
from pdbus.param_server.service import ParamServerService
from pdbus.param_server.settings import ParamServerSettings
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader


class ParamServers:
    """Of one model, by name. They end with `life`."""

    def __init__(self, url: str, model: str, folder: Path, life: AsyncExitStack) -> None:
        self.url, self.model, self.folder, self.life = url, model, folder, life
        self.running: dict[str, ParamServerService] = {}
        self.checkpoint: Path | None = None
        """That the last server with one was started with."""
        self._lives: dict[str, AsyncExitStack] = {}

    def id(self, name: str) -> str:
        return f"{self.model}-{name}"

    async def start(self, name: str, checkpoint: Path | None = None) -> ParamServerService:
        source = str(checkpoint) if checkpoint else None
        self.checkpoint = checkpoint or self.checkpoint
        settings = ParamServerSettings(id=self.id(name), model=self.model, data=self.folder / name, checkpoint=source)
        life = self._lives[name] = await self.life.enter_async_context(AsyncExitStack())
        bus = await life.enter_async_context(connect(self.url, name=name))
        service = self.running[name] = await life.enter_async_context(ParamServerService(settings, bus))

        def card(seq: int) -> Card:
            return service.card(Card("param_server", settings.id, bus.incarnation, seq, "ready", self.model))

        await life.enter_async_context(Presence(bus, card))
        return service

    async def stop(self, name: str) -> None:
        del self.running[name]
        await self._lives.pop(name).aclose()


async def tensors(servers: ParamServers, root: bytes) -> dict[str, np.ndarray]:
    """The version as a reader gets it that knows nothing yet."""
    async with connect(servers.url, name="reader") as bus, HistoryFollower(bus, servers.model) as follower:
        await follower.wait_for(lambda history: root in history.roots, Deadline.after(30))
        return await BlockReader(bus, servers.model, follower).tensors(root, RequestContext.after(30))
