"""A process of a measurement: param-servers, or readers that ask for one matrix again and again.

    python -m loadtest.param_servers.child serve URL FOLDER CHECKPOINT ID MODEL…    one server for each model
    python -m loadtest.param_servers.child read URL MODEL TENSOR READERS SECONDS    prints bytes and seconds

Servers end with their standard input.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

from pdbus.bus.bus import connect
from pdbus.bus.presence import Presence
from pdbus.context import Deadline, RequestContext
from pdbus.messages.presence import Card
from pdbus.param_server.service import ParamServerService
from pdbus.param_server.settings import SERVICE, ParamServerSettings
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader

_LOG_S = 10.0


async def serve(url: str, folder: str, checkpoint: str, id: str, *models: str) -> None:
    async with AsyncExitStack() as life:
        bus = await life.enter_async_context(connect(url, name=id))
        for model in models:
            data = Path(folder) / id / model
            settings = ParamServerSettings(id=f"{id}-{model}", model=model, data=data, checkpoint=checkpoint)
            service = await life.enter_async_context(ParamServerService(settings, bus))

            def card(seq: int, service: ParamServerService = service) -> Card:
                own = service.settings
                return service.card(Card(SERVICE, own.id, bus.incarnation, seq, "ready", own.model))

            await life.enter_async_context(Presence(bus, card))
        await asyncio.to_thread(sys.stdin.read)


async def read(url: str, model: str, tensor: str, readers: str, seconds: str) -> None:
    async with connect(url, name="reader") as bus, HistoryFollower(bus, model) as follower:
        await follower.caught_up(Deadline.after(_LOG_S))
        root = follower.history.head("stable")
        assert root, "the servers have committed it"
        begun = time.perf_counter()
        until = begun + float(seconds)

        async def again_and_again() -> int:
            reader, done = BlockReader(bus, model, follower), 0
            while time.perf_counter() < until:
                found = await reader.tensors(root, RequestContext.after(60), [tensor])
                done += found[tensor].nbytes
            return done

        read_bytes = sum(await asyncio.gather(*(again_and_again() for _ in range(int(readers)))))
        print(read_bytes, time.perf_counter() - begun)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    asyncio.run(serve(*arguments) if what == "serve" else read(*arguments))
