"""Two param-servers with one checkpoint in this process, and clients of the model's sparse tables."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from pdbus.bus.bus import connect
from pdbus.bus.presence import Presence
from pdbus.client.weights import RowTable, Weights
from pdbus.context import Deadline, RequestContext
from pdbus.messages.presence import Card
from pdbus.param_server.service import ParamServerService
from pdbus.param_server.settings import ParamServerSettings
from pdbus.param_server.table_fold import TableFold
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader

ROWS_OF_ALL, WIDTH = 20_000, 16


class TableRig:
    def __init__(self, url: str, model: str, folder: Path, checkpoint: Path, life: AsyncExitStack) -> None:
        self.url, self.model, self.folder, self.checkpoint = url, model, folder, checkpoint
        self.servers: dict[str, ParamServerService] = {}
        self._life = life
        self._lives: dict[str, AsyncExitStack] = {}

    def id(self, name: str) -> str:
        return f"{self.model}-{name}"

    async def start(self, name: str) -> None:
        settings = ParamServerSettings(
            id=self.id(name), model=self.model, data=self.folder / name, checkpoint=str(self.checkpoint)
        )
        life = self._lives[name] = await self._life.enter_async_context(AsyncExitStack())
        bus = await life.enter_async_context(connect(self.url, name=name))
        service = self.servers[name] = await life.enter_async_context(ParamServerService(settings, bus))

        def card(seq: int) -> Card:
            return service.card(Card("param_server", settings.id, bus.incarnation, seq, "ready", self.model))

        await life.enter_async_context(Presence(bus, card))

    async def stop(self, name: str) -> None:
        del self.servers[name]
        await self._lives.pop(name).aclose()

    async def client(self) -> Weights:
        """Of a process of its own, as far as a bus tells."""
        bus = await self._life.enter_async_context(connect(self.url, name="client"))
        weights = Weights(bus, self.model)
        self._life.push_async_callback(weights.close)
        return weights

    async def table(self, name: str = "items") -> RowTable:
        return (await self.client()).table(name)

    def folds(self, name: str = "items") -> list[TableFold]:
        found = [server._tables.fold(name) for server in self.servers.values()]
        return [fold for fold in found if fold]


def rows(*values: float) -> np.ndarray:
    return np.repeat(np.array(values, np.float32)[:, None], WIDTH, axis=1)


async def first_column(table: RowTable, *ids: int) -> list[float]:
    return (await table.lookup(ids)).values[:, 0].tolist()  # type: ignore[no-any-return]


async def whole(table: RowTable) -> np.ndarray:
    return (await table.lookup(np.arange(ROWS_OF_ALL))).values


async def in_blocks(rig: TableRig, root: bytes, tensor: str = "table.items") -> np.ndarray:
    """What the version itself holds."""
    async with connect(rig.url, name="reader") as bus, HistoryFollower(bus, rig.model) as follower:
        await follower.wait_for(lambda history: root in history.roots, Deadline.after(30))
        reader = BlockReader(bus, rig.model, follower)
        return (await reader.tensors(root, RequestContext.after(30), [tensor]))[tensor]
