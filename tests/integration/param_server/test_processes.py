"""Param-servers as processes of their own: killed without warning, started again."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline, RequestContext
from pdbus.model.checkpoint import open_checkpoint
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from tests.support.checkpoints import tiny_checkpoint


class Servers:
    """Child processes of one test, by number; all are killed at its end."""

    def __init__(self, url: str, model: str, folder: Path) -> None:
        self._environ = {**os.environ, "NATS_URL": url, "PDBUS_MODEL": model}
        self._model = model
        self.folder = folder
        self._children: dict[int, asyncio.subprocess.Process] = {}

    def id(self, number: int) -> str:
        return f"{self._model}-{number}"

    async def start(self, number: int, checkpoint: Path | None = None) -> None:
        own = {"PDBUS_ID": self.id(number), "PDBUS_DATA": str(self.folder / str(number))}
        environ = self._environ | own | ({"PDBUS_CHECKPOINT": str(checkpoint)} if checkpoint else {})
        self._children[number] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pdbus.param_server", env=environ
        )

    async def end(self, number: int, how: signal.Signals) -> int:
        child = self._children.pop(number)
        child.send_signal(how)
        return await asyncio.wait_for(child.wait(), 60)

    async def aclose(self) -> None:
        for number in list(self._children):
            await self.end(number, signal.SIGKILL)


@pytest.mark.timeout(400)
async def test_a_killed_server_is_missed_by_nobody_and_repairs_itself(
    nats_url: str, tmp_path: Path, unique: Callable[[str], str]
) -> None:
    model = unique("killed")
    checkpoint = tiny_checkpoint(tmp_path, "llama", vocab_size=4000, hidden_size=256)
    expected = dict(open_checkpoint(checkpoint).tensors())
    async with AsyncExitStack() as life:
        bus = await life.enter_async_context(connect(nats_url, name="observer"))
        await bus.logs.ensure()
        fleet = await life.enter_async_context(Fleet(bus))
        follower = await life.enter_async_context(HistoryFollower(bus, model))
        servers = Servers(nats_url, model, tmp_path)
        life.push_async_callback(servers.aclose)

        async def ready(*numbers: int) -> bytes:
            def holds(fleet: Fleet) -> bool:
                cards = [fleet.card(servers.id(number)) for number in numbers]
                return all(
                    card and fleet.state(card.id) == "live" and card.state == "ready" and card.roots for card in cards
                )

            await fleet.wait_for(holds, Deadline.after(100))
            await follower.caught_up(Deadline.after(30))
            head = follower.history.head("stable")
            assert head
            return head

        async def read(progress: Callable[[int, int], None] | None = None) -> bool:
            reader = BlockReader(bus, model, follower)
            root = follower.history.head("stable")
            assert root
            arrays = await reader.tensors(root, RequestContext.after(30), progress=progress)
            return arrays.keys() == expected.keys() and all(np.array_equal(arrays[n], expected[n]) for n in expected)

        await servers.start(0, checkpoint)
        await servers.start(1)
        root = await ready(0, 1)

        begun, over = asyncio.Event(), asyncio.Event()

        async def read_on() -> list[bool]:
            """As workers do that start one after another."""
            outcomes = []
            while not over.is_set():
                outcomes.append(await read(lambda done, total: begun.set()))
            return outcomes

        reading = asyncio.create_task(read_on())
        await begun.wait()
        await servers.end(0, signal.SIGKILL)
        await fleet.wait_for(lambda fleet: fleet.state(servers.id(0)) == "dead", Deadline.after(30))

        shutil.rmtree(servers.folder / "0")
        await servers.start(0)
        assert await ready(0) == root
        await servers.end(1, signal.SIGKILL)
        assert await read()
        over.set()
        outcomes = await reading
        assert outcomes
        assert all(outcomes)

        await servers.start(1, checkpoint)
        assert await ready(1) == root
        assert await servers.end(0, signal.SIGTERM) == 0
        assert await read()
        assert list(follower.history.roots) == [root]
        assert follower.history.members == (servers.id(0), servers.id(1))
