"""Param-servers on a real NATS server, in this process: what they put into the log, hold, serve and repair."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pdbus.bus.bus import Bus, connect
from pdbus.bus.presence import Presence
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, DeadlineExceeded, InvalidRequest
from pdbus.messages.param_server import BlocksRequest
from pdbus.messages.presence import Card
from pdbus.model.checkpoint import open_checkpoint
from pdbus.param_server import reading
from pdbus.param_server.service import ParamServerService
from pdbus.peers.blocks import BlockFetcher, Wanted
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader, fetch_manifest
from pdbus.subjects import CHANGELOG, WEIGHT_BLOCKS_OF
from pdbus.weights.blocks import SHARDS
from pdbus.weights.placement import duties
from tests.support.checkpoints import tiny_checkpoint
from tests.support.late import late
from tests.support.param_servers import ParamServers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("other"), "llama", seed=1)


@dataclass
class Stage:
    """One model's param-servers, and an observer."""

    servers: ParamServers
    bus: Bus
    follower: HistoryFollower

    @property
    def model(self) -> str:
        return self.servers.model

    @property
    def folder(self) -> Path:
        return self.servers.folder

    async def start(self, name: str, checkpoint: Path | None = None) -> ParamServerService:
        return await self.servers.start(name, checkpoint)

    async def stop(self, name: str) -> None:
        await self.servers.stop(name)

    async def root(self) -> bytes:
        await self.follower.caught_up(Deadline.after(30))
        head = self.follower.history.head("stable")
        assert head
        return head

    async def read(self, within_s: float = 30.0) -> dict[str, np.ndarray]:
        """The newest version, by a reader that knows nothing yet."""
        reader = BlockReader(self.bus, self.model, self.follower)
        return await reader.tensors(await self.root(), RequestContext.after(within_s))

    async def commits(self) -> list[bytes]:
        await self.follower.caught_up(Deadline.after(30))
        return list(self.follower.history.roots)


@pytest.fixture
async def stage(nats_url: str, tmp_path: Path, unique: Callable[[str], str]) -> AsyncIterator[Stage]:
    model = unique("weights")
    async with AsyncExitStack() as life, connect(nats_url, name="observer") as bus:
        await bus.logs.ensure()
        async with HistoryFollower(bus, model) as follower, life:
            yield Stage(ParamServers(nats_url, model, tmp_path, life), bus, follower)


def equals_checkpoint(arrays: dict[str, np.ndarray], path: Path) -> bool:
    expected = dict(open_checkpoint(path).tensors())
    return arrays.keys() == expected.keys() and all(np.array_equal(arrays[name], expected[name]) for name in expected)


async def test_a_checkpoint_becomes_a_commit_that_can_be_read_back(stage: Stage, checkpoint: Path) -> None:
    service = await stage.start("a", checkpoint)
    root = await stage.root()
    version = stage.follower.history.roots[root]
    assert version.commit is not None
    assert version.commit.parent is None
    assert [layer for layer, _ in version.commit.layers] == ["embed", "layers.0", "layers.1", "head", "meta"]
    assert stage.follower.history.members == (f"{stage.model}-a",)
    assert stage.follower.history.refs == {}
    assert service.card(Card("param_server", "a", "i", 1, "ready", stage.model)).roots == (root,)
    assert equals_checkpoint(await stage.read(), checkpoint)
    reader = BlockReader(stage.bus, stage.model, stage.follower)
    assert await reader.meta(root, RequestContext.after(30)) == dict(open_checkpoint(checkpoint).meta)


async def test_two_servers_of_one_checkpoint_make_one_commit(stage: Stage, checkpoint: Path) -> None:
    await stage.start("a", checkpoint)
    await stage.start("b", checkpoint)
    assert len(await stage.commits()) == 1
    assert len(stage.follower.history.members) == 2


async def test_an_unchanged_checkpoint_is_not_read_again(
    stage: Stage, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.start("a", checkpoint)
    last = stage.follower.history.seq
    await stage.stop("a")
    monkeypatch.setattr(reading, "open_checkpoint", lambda source: pytest.fail("it was opened again"))
    await stage.start("a", checkpoint)
    assert len(await stage.commits()) == 1
    assert stage.follower.history.seq >= last
    assert equals_checkpoint(await stage.read(), checkpoint)


async def test_another_checkpoint_is_committed_as_the_child_and_going_back_makes_the_old_one_newest(
    stage: Stage, checkpoint: Path, other_checkpoint: Path
) -> None:
    await stage.start("a", checkpoint)
    first = await stage.root()
    await stage.stop("a")
    await stage.start("a", other_checkpoint)
    second = await stage.root()
    child = stage.follower.history.roots[second].commit
    assert second != first
    assert child is not None
    assert child.parent == first
    assert "meta" not in dict(child.layers)
    assert equals_checkpoint(await stage.read(), other_checkpoint)
    await stage.stop("a")
    await stage.start("a", checkpoint)
    assert await stage.root() == first
    assert await stage.commits() == [first, second]


async def test_with_one_of_two_servers_gone_the_other_serves_all(stage: Stage, checkpoint: Path) -> None:
    await stage.start("a", checkpoint)
    await stage.start("b", checkpoint)
    await stage.stop("a")
    assert equals_checkpoint(await stage.read(), checkpoint)
    await stage.start("a", checkpoint)
    await stage.stop("b")
    assert equals_checkpoint(await stage.read(), checkpoint)


async def test_a_server_without_checkpoint_copies_all_it_has_to_hold_from_the_others(
    stage: Stage, checkpoint: Path
) -> None:
    await stage.start("a", checkpoint)
    await stage.start("b")
    await stage.stop("a")
    assert equals_checkpoint(await stage.read(), checkpoint)


async def test_a_server_that_lost_its_blocks_gets_them_back_from_the_others(stage: Stage, checkpoint: Path) -> None:
    await stage.start("a", checkpoint)
    await stage.start("b")
    await stage.stop("b")
    shutil.rmtree(stage.folder / "b")
    await stage.start("b")
    await stage.stop("a")
    assert equals_checkpoint(await stage.read(), checkpoint)


async def test_a_lone_server_that_lost_its_blocks_reads_its_checkpoint_to_the_same_version(
    stage: Stage, checkpoint: Path
) -> None:
    await stage.start("a", checkpoint)
    root = await stage.root()
    await stage.stop("a")
    shutil.rmtree(stage.folder / "a")
    await stage.start("a", checkpoint)
    assert await stage.commits() == [root]
    assert equals_checkpoint(await stage.read(), checkpoint)


@pytest.mark.parametrize("way", ["another server", "the checkpoint"])
async def test_blocks_that_went_bad_on_disk_are_never_served_and_are_repaired(
    stage: Stage, checkpoint: Path, way: str
) -> None:
    await stage.start("a", checkpoint)
    if way == "another server":
        await stage.start("b")
    await stage.stop("a")
    pack = next((stage.folder / "a").rglob("*.pack"))
    content = bytearray(pack.read_bytes())
    content[::1000] = bytes(byte ^ 1 for byte in content[::1000])
    pack.write_bytes(content)
    a = await stage.start("a", checkpoint if way == "the checkpoint" else None)
    from_a = BlockFetcher(stage.bus, lambda _: [WEIGHT_BLOCKS_OF(model=stage.model, server=a.settings.id)])
    manifest = await fetch_manifest(from_a, await stage.root(), RequestContext.after(30))
    wanted = [Wanted(block.digest, block.shard, block.size) for block in manifest.blocks()]
    got: list[bytes] = []

    async def take(digest: bytes, content: memoryview) -> None:
        got.append(digest)

    await from_a.fetch(wanted, take, RequestContext.after(30))
    assert set(got) == {block.digest for block in manifest.blocks()}


async def test_three_servers_share_the_blocks(stage: Stage, checkpoint: Path) -> None:
    await stage.start("a", checkpoint)
    await stage.start("b", checkpoint)
    await stage.start("c", checkpoint)
    ids = [f"{stage.model}-{name}" for name in ("a", "b", "c")]
    own = duties(ids[2], ids, ids)
    assert len(own) < SHARDS
    from_c = BlockFetcher(stage.bus, lambda _: [WEIGHT_BLOCKS_OF(model=stage.model, server=ids[2])])
    manifest = await fetch_manifest(from_c, await stage.root(), RequestContext.after(30))
    blocks = [block for block in manifest.blocks() if not block.tensor.startswith("@")]  # manifests are everywhere
    held = {block.digest for block in blocks if block.shard in own}
    async with stage.bus.bulk.receive() as incoming:
        digests = tuple({block.digest for block in blocks})
        request = BlocksRequest(digests, stage.bus.bulk.address, incoming.stream)
        reply = await stage.bus.call(
            WEIGHT_BLOCKS_OF(model=stage.model, server=ids[2]), request, RequestContext.after(30)
        )
    # c came last and took no more than its own.
    assert {digest for digest, size in zip(digests, reply.sizes, strict=True) if size >= 0} == held
    assert equals_checkpoint(await stage.read(), checkpoint)
    await stage.stop("c")
    assert equals_checkpoint(await stage.read(), checkpoint)


async def test_the_ref_moves_only_once_a_worker_of_each_kind_has_the_version_ready(
    stage: Stage, checkpoint: Path
) -> None:
    await stage.start("a", checkpoint)
    await stage.start("b", checkpoint)
    root = await stage.root()
    cards = {"prefill": (), "decode": ()}

    def card(service: str) -> Callable[[int], Card]:
        return lambda seq: Card(service, f"{stage.model}-{service}", "i", seq, "ready", stage.model, cards[service])

    async with Presence(stage.bus, card("prefill")) as prefill, Presence(stage.bus, card("decode")) as decode:
        cards["prefill"] = (root,)
        await prefill.announce()
        with pytest.raises(DeadlineExceeded):
            await stage.follower.wait_for(lambda history: history.refs, Deadline.after(0.3))
        cards["decode"] = (root,)
        await decode.announce()
        assert await stage.follower.wait_for(lambda history: history.refs, Deadline.after(30)) == {"stable": root}
        moves = stage.follower.seq
        with pytest.raises(DeadlineExceeded):  # the other server has nothing to add
            await stage.follower.wait_for(lambda history: history.seq > moves, Deadline.after(0.3))
    assert stage.follower.history.wanted == (root,)


async def test_what_cant_be_served_is_refused_before_anything_is_in_the_log(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        await stage.start("a", tmp_path / "empty")
    assert await stage.commits() == []


async def test_two_processes_on_one_folder_are_refused(stage: Stage, checkpoint: Path) -> None:
    await stage.start("a", checkpoint)
    (stage.folder / "b").symlink_to(stage.folder / "a")
    with pytest.raises(Conflict, match="another param-server"):
        await stage.start("b", checkpoint)


async def test_a_stopped_server_answers_nobody_and_holds_nothing(stage: Stage, checkpoint: Path) -> None:
    service = await stage.start("a", checkpoint)
    await stage.read()
    await service.stop_intake()
    await service.drain(Deadline.after(30))
    assert service.load().running == service.load().streams == 0
    await late("could not be fetched", stage.read)


async def test_an_entry_that_cant_be_read_stops_neither_the_followers_nor_the_writers(
    stage: Stage, checkpoint: Path
) -> None:
    stage.bus.transport.send(CHANGELOG(model=stage.model).name, b"\xc1 garbage")
    await stage.bus.transport.barrier()
    await stage.start("a", checkpoint)
    assert len(await stage.commits()) == 1
