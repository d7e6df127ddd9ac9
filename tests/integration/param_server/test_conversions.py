"""Versions in other precisions, made by real param-servers: by one for all, from the log's word alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from pdbus.bus.bus import connect
from pdbus.client.weights import Weights
from pdbus.client.weights.edits import NewBlock
from pdbus.context import Deadline, RequestContext
from pdbus.errors import InvalidRequest, NotFound
from pdbus.model.convert import Made, converted
from pdbus.param_server import convert
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.weights.packed import Floats, Int8Rows, widened
from tests.support.checkpoints import tiny_checkpoint
from tests.support.param_servers import ParamServers, tensors

EMBED, Q0, NORM = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its embedding has several blocks, which hold other rows in fp32 than in fewer bits."""
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", vocab_size=5000)


@pytest.fixture
async def servers(nats_url: str, tmp_path: Path, unique: Callable[[str], str]) -> AsyncIterator[ParamServers]:
    async with AsyncExitStack() as life:
        yield ParamServers(nats_url, unique("precision"), tmp_path, life)


@pytest.fixture
async def weights(servers: ParamServers, checkpoint: Path) -> AsyncIterator[Weights]:
    for name in ("a", "b", "c"):
        await servers.start(name, checkpoint if name == "a" else None)
    async with connect(servers.url, name="asking") as bus:
        weights = Weights(bus, servers.model)
        yield weights
        await weights.close()


async def test_each_precision_is_a_version_that_tells_what_it_was_made_of(
    servers: ParamServers, weights: Weights
) -> None:
    root = (await weights.history()).head("stable")
    assert root
    made: dict[str, bytes] = {}
    for precision in ("fp16", "bf16", "fp8", "int8"):
        asked = await weights.convert("stable", precision)
        assert asked.ref == f"stable-{precision}"
        made[precision] = await weights.converted(root, precision, 100.0)
    assert len({root, *made.values()}) == 5
    history = await weights.history()
    assert history.head("stable-int8") == made["int8"]
    commit = history.roots[made["int8"]].commit
    assert commit
    assert (commit.source, commit.precision) == (root, "int8")

    async with connect(servers.url, name="reader") as bus, HistoryFollower(bus, servers.model) as follower:
        await follower.caught_up(Deadline.after(30))
        reader, ctx = BlockReader(bus, servers.model, follower), RequestContext.after(30)
        fp32 = await reader.tensors(root, ctx)
        for precision, version in made.items():
            read = await reader.tensors(version, ctx)
            dtype = "fp16" if precision == "int8" else precision
            expected = widened(dtype, converted(EMBED, fp32[EMBED], dtype), fp32[EMBED].shape)
            assert np.array_equal(read[EMBED], expected)
            assert np.array_equal(read[NORM], fp32[NORM])
            assert np.array_equal(read[Q0], widened(precision, converted(Q0, fp32[Q0], precision), fp32[Q0].shape))
        stored = await reader.stored(made["int8"], ctx)
        head = stored["lm_head.weight"]
        assert isinstance(head, Int8Rows)
        assert np.array_equal(head.packed(), converted("head", fp32[EMBED], "int8"))
        assert reader.in_int8(root) == reader.in_int8(made["int8"]) == (root, made["int8"])
        assert reader.in_int8(made["fp16"]) is None
        assert await reader.meta(made["fp8"], ctx) == await reader.meta(root, ctx)


async def test_a_line_is_followed_by_whichever_server_lives_and_back_again(
    servers: ParamServers, weights: Weights
) -> None:
    first = (await weights.history()).head("stable")
    assert first
    await weights.move_ref("stable", first.hex(), now=True)
    await weights.convert("stable", "int8", follow=True)
    made = await weights.converted(first, "int8", 100.0)
    await servers.stop("b")
    async with weights.begin() as update:
        await update.stage_elements(NORM, [0], [5.0])
        second = (await update.commit()).root
    await servers.stop("c")
    next_made = await weights.converted(second, "int8", 100.0)
    assert next_made != made
    await weights.move_ref("stable", second.hex(), now=True)
    await weights.rollback(now=True)
    history = await weights.history()
    async with connect(servers.url, name="observer") as bus, HistoryFollower(bus, servers.model) as follower:
        await follower.wait_for(lambda history: history.head("stable-int8") == made, Deadline.after(30))
    commits = [version for version in history.roots.values() if version.commit and version.commit.source]
    assert {version.root for version in commits} == {made, next_made}


async def test_only_blocks_whose_rows_changed_are_made_anew(
    servers: ParamServers, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    await weights.convert("stable", "int8", follow=True)
    first = (await weights.history()).head("stable")
    assert first
    await weights.converted(first, "int8", 100.0)
    made: list[tuple[str, int]] = []

    def packed(one: Made, rows: Floats, step: int, index: int) -> list[NewBlock]:
        blocks = as_it_is(one, rows, step, index)
        made.extend((block.tensor, block.index) for block in blocks)
        return blocks

    as_it_is = convert._packed
    monkeypatch.setattr(convert, "_packed", packed)
    async with weights.begin() as update:
        width = update.tensor(EMBED).shape[1]
        await update.stage_rows(EMBED, [4999], np.full((1, width), 0.5, np.float32))
        await update.stage_elements(Q0, [3], [2.0])
        await update.stage_elements(NORM, [0], [5.0])
        second = (await update.commit()).root
    root = await weights.converted(second, "int8", 100.0)
    manifest = await weights.manifest(root)
    last = {name: len(manifest.tensor(name).blocks) - 1 for name in (EMBED, HEAD)}
    # Each by one server, or by several for whom the others seemed to be gone.
    assert set(made) == {(EMBED, last[EMBED]), (HEAD, last[HEAD]), (Q0, 0)}
    assert last[HEAD] > 0
    fp32, read = await tensors(servers, second), await tensors(servers, root)
    assert np.array_equal(read[Q0], widened("int8", converted(Q0, fp32[Q0], "int8"), fp32[Q0].shape))
    assert np.array_equal(read[EMBED], fp32[EMBED].astype(np.float16).astype(np.float32))
    assert np.array_equal(read[HEAD], widened("int8", converted(HEAD, fp32[EMBED], "int8"), fp32[EMBED].shape))
    assert read[NORM][0] == 5.0


async def test_two_servers_make_the_same_digests(servers: ParamServers, weights: Weights) -> None:
    """Each in a model of its own."""
    root = (await weights.history()).head("stable")
    assert root
    await weights.convert(root.hex(), "int8")
    made = await weights.converted(root, "int8", 100.0)
    other = ParamServers(servers.url, f"{servers.model}-2", servers.folder / "other", servers.life)
    await other.start("z", servers.checkpoint)
    async with connect(servers.url, name="asking too") as bus:
        again = Weights(bus, other.model)
        await again.convert(root.hex(), "int8")
        assert await again.converted(root, "int8", 100.0) == made
        await again.close()


async def test_what_can_not_be_made_is_refused_with_the_reason(weights: Weights) -> None:
    head = (await weights.history()).head("stable")
    assert head
    with pytest.raises(InvalidRequest, match="not in int3"):
        await weights.convert("stable", "int3")
    with pytest.raises(NotFound):
        await weights.convert("nothing", "int8")
    with pytest.raises(InvalidRequest, match="is no ref"):
        await weights.convert(head.hex(), "int8", follow=True)
    await weights.convert("stable", "fp16")
    await weights.converted(head, "fp16", 100.0)
    with pytest.raises(InvalidRequest, match="convert that"):
        await weights.convert("stable-fp16", "int8")
    with pytest.raises(InvalidRequest, match="update that"):
        async with weights.begin(ref="stable-fp16"):
            pass
