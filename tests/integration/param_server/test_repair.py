"""Servers that come, lose or spoil blocks: nobody gets a wrong one, and nobody serves what it lacks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pdbus.bus.bus import Bus, connect
from pdbus.context import Deadline, RequestContext
from pdbus.messages.param_server import HeatWanted
from pdbus.param_server.serving import BlockServer
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.subjects import WEIGHTS_HEAT
from pdbus.weights.manifest import Block, Manifest
from pdbus.weights.placement import owners
from tests.support.checkpoints import tiny_checkpoint
from tests.support.param_servers import ParamServers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", vocab_size=5000)


@pytest.fixture
async def servers(nats_url: str, tmp_path: Path, unique: Callable[[str], str]) -> AsyncIterator[ParamServers]:
    async with AsyncExitStack() as life:
        yield ParamServers(nats_url, unique("repair"), tmp_path, life)


@pytest.fixture
async def reader(servers: ParamServers) -> AsyncIterator[tuple[Bus, HistoryFollower, BlockReader]]:
    async with connect(servers.url, name="reader") as bus, HistoryFollower(bus, servers.model) as follower:
        yield bus, follower, BlockReader(bus, servers.model, follower)


async def test_a_new_server_joins_the_group_of_a_shard_only_when_it_holds_all_of_it(
    servers: ParamServers,
    checkpoint: Path,
    reader: tuple[Bus, HistoryFollower, BlockReader],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, follower, blocks = reader
    await servers.start("a", checkpoint)
    await servers.start("b")
    await follower.wait_for(lambda history: history.head("stable"), Deadline.after(30))
    root = follower.history.head("stable")
    assert root
    manifest = await blocks.manifest(root, RequestContext.after(30))
    joined: list[frozenset[int]] = []
    join = BlockServer.join

    async def checked(server: BlockServer, shards: frozenset[int]) -> None:
        if server._server == servers.id("c"):
            assert all(block.digest in server._store for block in _blocks(manifest) if block.shard in shards)
            joined.append(shards)
        await join(server, shards)

    monkeypatch.setattr(BlockServer, "join", checked)
    c = await servers.start("c")
    own = {
        block.shard for block in _blocks(manifest) if servers.id("c") in owners(block.shard, follower.history.members)
    }
    assert own
    assert own <= c._server._groups.keys()
    assert not own & joined[0]


def _blocks(manifest: Manifest) -> list[Block]:
    return [block for block in manifest.blocks() if not block.tensor.startswith("@")]


async def test_a_block_that_goes_bad_after_it_was_read_is_found_and_brought_from_the_replica(
    servers: ParamServers, checkpoint: Path, reader: tuple[Bus, HistoryFollower, BlockReader]
) -> None:
    _, follower, blocks = reader
    a = await servers.start("a", checkpoint)
    await servers.start("b")
    await follower.wait_for(lambda history: history.head("stable"), Deadline.after(30))
    root = follower.history.head("stable")
    assert root
    expected = await blocks.tensors(root, RequestContext.after(30))
    (pack,) = (servers.folder / "a").rglob("*.pack")
    content = bytearray(pack.read_bytes())
    content[100_000] ^= 1
    with pack.open("r+b") as file:  # the server has it mapped
        file.write(content)
    for _ in range(3):  # readers check what they get, and go to the other one
        found = await blocks.tensors(root, RequestContext.after(30))
        assert all((found[name] == expected[name]).all() for name in expected)
    await a._upkeep.scrub(1 << 30)
    await a._upkeep.scrub(1 << 30)
    assert a._store.spoilt == 1
    assert await a._upkeep.round()
    await servers.stop("b")
    found = await blocks.tensors(root, RequestContext.after(30))
    assert all((found[name] == expected[name]).all() for name in expected)


async def test_servers_tell_what_is_read_and_changed_most(
    servers: ParamServers, checkpoint: Path, reader: tuple[Bus, HistoryFollower, BlockReader]
) -> None:
    bus, follower, blocks = reader
    a = await servers.start("a", checkpoint)
    await follower.wait_for(lambda history: history.head("stable"), Deadline.after(30))
    root = follower.history.head("stable")
    assert root
    for _ in range(3):
        await blocks.tensors(root, RequestContext.after(30), ["model.embed_tokens.weight"])
    await blocks.tensors(root, RequestContext.after(30), ["model.norm.weight"])
    await a._upkeep.round()
    to = WEIGHTS_HEAT(model=servers.model, server=servers.id("a"))
    reply = await bus.call(to, HeatWanted(3), RequestContext.after(30))
    assert {block.tensor for block in reply.blocks} == {"model.embed_tokens.weight"}
    reads = {tensor.tensor: tensor.reads / tensor.blocks for tensor in reply.tensors}
    assert reads == pytest.approx({"model.embed_tokens.weight": 3, "model.norm.weight": 1}, rel=0.1)
