"""Param-servers in the test's process, on a real bus, and a reader of their versions."""

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


class Rig:
    """Two param-servers with one checkpoint, as one model."""

    def __init__(self, url: str, model: str, folder: Path, life: AsyncExitStack) -> None:
        self.url, self.model, self.folder, self.life = url, model, folder, life
        self.servers: dict[str, ParamServerService] = {}
        self._lives: dict[str, AsyncExitStack] = {}

    async def start(self, name: str, checkpoint: Path | None = None) -> None:
        id, source = f"{self.model}-{name}", str(checkpoint) if checkpoint else None
        settings = ParamServerSettings(id=id, model=self.model, data=self.folder / name, checkpoint=source)
        life = self._lives[name] = await self.life.enter_async_context(AsyncExitStack())
        bus = await life.enter_async_context(connect(self.url, name=name))
        service = self.servers[name] = await life.enter_async_context(ParamServerService(settings, bus))

        def card(seq: int) -> Card:
            return service.card(Card("param_server", id, bus.incarnation, seq, "ready", self.model))

        await life.enter_async_context(Presence(bus, card))

    async def stop(self, name: str) -> None:
        del self.servers[name]
        await self._lives.pop(name).aclose()


async def tensors(rig: Rig, root: bytes) -> dict[str, np.ndarray]:
    """The version as a reader gets it that knows nothing yet."""
    async with connect(rig.url, name="reader") as bus, HistoryFollower(bus, rig.model) as follower:
        await follower.wait_for(lambda history: root in history.roots, Deadline.after(10))
        return await BlockReader(bus, rig.model, follower).tensors(root, RequestContext.after(20))
