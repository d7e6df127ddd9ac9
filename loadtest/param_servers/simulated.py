"""Param-servers that take a fixed time for a block, one block at a time, on the in-memory twin of the bus.

No core is the limit, so that it shows what the division of labour gives: real readers, real queue groups and owners of
shards, and blocks of a few bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from pdbus.bus.bus import Bus, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.canonical import content_digest
from pdbus.context import Deadline, RequestContext
from pdbus.errors import PdbusError
from pdbus.messages.bulk import BlockHead
from pdbus.messages.common import Digest
from pdbus.messages.param_server import BlocksReply, BlocksRequest
from pdbus.peers.blocks import BlockFetcher, Source, Wanted
from pdbus.subjects import TRANSFER, WEIGHT_BLOCKS, WEIGHT_BLOCKS_OF
from pdbus.weights.blocks import SHARDS, shard_of
from pdbus.weights.placement import owners, ranked

_BLOCKS = 64
_SEND_S = 30.0


class SimulatedServer:
    """Serves the shards of its models that it owns."""

    def __init__(self, bus: Bus, name: str, contents: Mapping[Digest, bytes], service_s: float) -> None:
        self._bus, self._name, self._contents, self._service_s = bus, name, contents, service_s
        self._turn = asyncio.Lock()
        self._sends: set[asyncio.Task[None]] = set()

    async def join(self, life: AsyncExitStack, model: str, members: Collection[str]) -> None:
        to = WEIGHT_BLOCKS_OF(model=model, server=self._name)
        life.push_async_callback((await self._bus.serve(to, self._answer, limit=256)).close)
        for shard in range(SHARDS):
            if self._name in owners(shard, members):
                group = await self._bus.serve(WEIGHT_BLOCKS(model=model, shard=str(shard)), self._answer, limit=256)
                life.push_async_callback(group.close)

    async def _answer(self, message: BlocksRequest, ctx: RequestContext) -> BlocksReply:
        send = asyncio.create_task(self._send(message))
        self._sends.add(send)
        send.add_done_callback(self._sends.discard)
        return BlocksReply(self._name, tuple(len(self._contents[digest]) for digest in message.digests))

    async def _send(self, message: BlocksRequest) -> None:
        subject = TRANSFER.name(address=message.receiver, stream=message.stream)
        with contextlib.suppress(PdbusError):  # a reader that went away
            async with self._bus.bulk.send(subject, Deadline.after(_SEND_S)) as out:
                for index, digest in enumerate(message.digests):
                    async with self._turn:
                        await asyncio.sleep(self._service_s)
                    await out.item(BlockHead(index), self._contents[digest])


async def simulated_hot_matrix(
    servers: int, readers: int = 4, service_s: float = 0.02, duration_s: float = 4.0
) -> float:
    """Blocks a second of one matrix of 64 blocks."""
    async with _served({"hot": [f"s{number}" for number in range(servers)]}, service_s) as (broker, places):
        return await _read(broker, "hot", places["hot"], readers, duration_s)


async def simulated_hot_model(
    own_servers: int, readers: int = 4, colder: int = 2, service_s: float = 0.02, duration_s: float = 4.0
) -> float:
    """Blocks a second of a hot model beside `colder` others that are read as much: with so many servers of its own, or,
    with none, from the one server that they all share."""
    hot = [f"own{number}" for number in range(own_servers)] or ["shared"]
    groups = {"hot": hot} | {f"cold{number}": ["shared"] for number in range(colder)}
    async with _served(groups, service_s) as (broker, places):
        rates = await asyncio.gather(
            *(_read(broker, model, members, readers, duration_s) for model, members in places.items())
        )
    return rates[0]


@asynccontextmanager
async def _served(
    groups: Mapping[str, Sequence[str]], service_s: float
) -> AsyncIterator[tuple[MemoryBroker, Mapping[str, Sequence[str]]]]:
    """`groups`: the servers of each model."""
    broker = MemoryBroker()
    contents: dict[Digest, bytes] = {}
    for model in groups:
        contents |= {content_digest(content): content for content in _contents(model)}
    async with AsyncExitStack() as life:
        servers: dict[str, SimulatedServer] = {}
        for name in dict.fromkeys(name for members in groups.values() for name in members):
            bus = await life.enter_async_context(memory_bus(broker))
            servers[name] = SimulatedServer(bus, name, contents, service_s)
        for model, members in groups.items():
            for name in members:
                await servers[name].join(life, model, members)
        yield broker, groups


async def _read(broker: MemoryBroker, model: str, members: Sequence[str], readers: int, duration_s: float) -> float:
    """Blocks a second that readers of the whole matrix get."""

    def sources(shard: int) -> Sequence[Source]:
        named = (WEIGHT_BLOCKS_OF(model=model, server=server) for server in ranked(shard, members))
        return (WEIGHT_BLOCKS(model=model, shard=str(shard)), *named)

    digests = [content_digest(content) for content in _contents(model)]
    wanted = [Wanted(digest, shard_of(f"{model}.weight", index)) for index, digest in enumerate(digests)]
    done = 0

    async def take(digest: Digest, content: memoryview) -> None:
        nonlocal done
        done += 1

    async def again_and_again() -> None:
        async with memory_bus(broker) as bus:
            fetcher = BlockFetcher(bus, sources)
            while True:
                await fetcher.fetch(wanted, take, RequestContext.after(60))

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(duration_s), asyncio.TaskGroup() as group:
            for _ in range(readers):
                group.create_task(again_and_again())
    return done / duration_s


def _contents(model: str) -> list[bytes]:
    return [f"{model} {index}".encode() for index in range(_BLOCKS)]
