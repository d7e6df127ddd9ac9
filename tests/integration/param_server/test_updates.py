"""Updates on real param-servers: staged, prepared, committed or aborted; what travels; what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdbus.bus.bus import connect
from pdbus.client.weights import Weights
from pdbus.errors import Conflict, DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from pdbus.messages.changelog import LogEntry
from pdbus.messages.param_server import Stage
from pdbus.param_server import staging
from tests.support.checkpoints import tiny_checkpoint
from tests.support.param_servers import ParamServers, tensors
from tests.support.until import until

EMBED, Q0 = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
UP1, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture
async def rig(
    nats_url: str, tmp_path: Path, unique: Callable[[str], str], checkpoint: Path
) -> AsyncIterator[ParamServers]:
    async with AsyncExitStack() as life:
        rig = ParamServers(nats_url, unique("updates"), tmp_path, life)
        await rig.start("a", checkpoint)
        await rig.start("b", checkpoint)
        yield rig


@pytest.fixture
async def weights(rig: ParamServers) -> AsyncIterator[Weights]:
    async with connect(rig.url, name="pusher") as bus:
        weights = Weights(bus, rig.model)
        yield weights
        await weights.close()


async def test_a_commit_makes_a_version_that_differs_in_what_was_staged_and_nothing_else(
    rig: ParamServers, weights: Weights
) -> None:
    before = await tensors(rig, await _head(weights))
    rng = np.random.default_rng(0)
    new = rng.normal(size=before[Q0].shape).astype(np.float32)
    rows, columns = before[EMBED].shape
    a, b = (rng.normal(size=size).astype(np.float32) for size in ((rows, 2), (2, columns)))
    async with weights.begin(message="all forms") as update:
        await update.stage(Q0, new)
        await update.stage_rows(UP1, [3, 1], before[UP1][:2] + 1)
        await update.stage_elements(NORM, [0, 5], [2.0, 3.0])
        await update.stage_low_rank(EMBED, a, b)
        done = await update.commit()
    assert done.changed_blocks >= 4
    after = await tensors(rig, done.root)
    up = before[UP1].copy()
    up[[3, 1]] = before[UP1][:2] + 1
    norm = before[NORM].copy()
    norm[[0, 5]] = [2.0, 3.0]
    expected = before | {Q0: new, UP1: up, NORM: norm}
    assert np.allclose(after.pop(EMBED), expected.pop(EMBED) + a @ b, atol=1e-5)
    assert all(np.array_equal(after[name], expected[name]) for name in expected)
    version = await weights.resolve(done.root.hex())
    assert version.commit
    assert [layer for layer, _ in version.commit.layers] == ["embed", "layers.0", "layers.1", "head"]
    assert version.commit.parent
    diffs = await weights.diff(version.commit.parent.hex(), done.root.hex())
    assert {diff.name for diff in diffs} == {EMBED, Q0, UP1, NORM}


async def _head(weights: Weights) -> bytes:
    head = (await weights.history()).head("stable")
    assert head
    return head


class _Deaf(asyncio.Event):
    """News never come: what waits for them looks again after its time only."""

    def set(self) -> None:
        pass


async def test_an_update_begins_on_the_head_as_it_is_now(rig: ParamServers, weights: Weights) -> None:
    """Also in a process that has not read of it yet: else its commit would be a conflict, all work on it in vain."""
    async with connect(rig.url, name="another pusher") as bus:
        other = Weights(bus, rig.model)
        try:
            await other.history()
            follower = other._follower._follower
            assert follower
            follower._news = _Deaf()
            async with weights.begin() as update:
                await update.stage_elements(NORM, [0], [2.0])
                done = await update.commit()
            async with other.begin() as update:
                assert update.parent == done.root
        finally:
            await other.close()


async def test_only_what_differs_travels(rig: ParamServers, weights: Weights) -> None:
    before = await tensors(rig, await _head(weights))
    new = before[EMBED].copy()
    new[0, :3] += 1
    async with weights.begin() as update:
        assert await update.stage(EMBED, new, before=before[EMBED]) == 1
        assert await update.stage(Q0, before[Q0]) == 0
        done = await update.commit()
    assert done.changed_blocks == 1
    assert done.sent_bytes < 30_000  # three elements and the manifests, to two servers
    assert np.array_equal((await tensors(rig, done.root))[EMBED], new)


async def test_a_wrong_idea_of_what_was_there_costs_bytes_and_not_the_result(
    rig: ParamServers, weights: Weights
) -> None:
    before = await tensors(rig, await _head(weights))
    async with weights.begin() as update:
        await update.stage(EMBED, before[EMBED] + 1, before=before[EMBED] + 2)
        done = await update.commit()
    assert np.array_equal((await tensors(rig, done.root))[EMBED], before[EMBED] + 1)


async def test_an_update_of_nothing_makes_no_version(rig: ParamServers, weights: Weights) -> None:
    head = await _head(weights)
    before = await tensors(rig, head)
    assert (await weights.push_state_dict(before)).root == head
    assert (await weights.history()).head("stable") == head


async def test_of_two_updates_at_once_one_wins_and_the_other_is_told_by_whom(
    weights: Weights, rig: ParamServers
) -> None:
    async with weights.begin() as first:
        await first.stage_elements(NORM, [0], [5.0])
        async with weights.begin() as second:
            await second.stage_elements(NORM, [1], [6.0])
            won = await first.commit()
            with pytest.raises(Conflict, match="moved on to"):
                await second.commit()
    assert await _head(weights) == won.root
    norm = (await tensors(rig, won.root))[NORM]
    assert norm[0] == 5.0
    assert norm[1] != 6.0


async def test_lines_go_on_apart(weights: Weights) -> None:
    head = await _head(weights)
    await weights.move_ref("stable", head.hex(), now=True)
    await weights.canary(head.hex(), 0.25)
    async with weights.begin(ref="canary") as one, weights.begin() as other:
        await one.stage_elements(NORM, [0], [5.0])
        await other.stage_elements(NORM, [0], [6.0])
        await one.commit()
        await other.commit()
    history = await weights.history()
    assert history.pending.keys() == {"canary", "stable"}
    assert history.shares == {"canary": 0.25}


async def test_an_update_that_is_left_leaves_nothing(rig: ParamServers, weights: Weights) -> None:
    head = await _head(weights)
    before = {name: set(server._store.packs) for name, server in rig.running.items()}
    async with weights.begin() as update:
        await update.stage(Q0, np.zeros((await weights.manifest(head)).tensors[Q0].shape, np.float32))
        await update._stager.settle()
        for name, server in rig.running.items():
            await until(lambda name=name, server=server: bool(set(server._store.packs) - before[name]))
    assert await _head(weights) == head
    for name, server in rig.running.items():
        await until(lambda server=server: not list(server._staging.transactions) and not server._staging._taking)
        await server._upkeep.reclaim()
        assert set(server._store.packs) == before[name]


async def test_a_transaction_outlives_a_restart_of_its_server(rig: ParamServers, weights: Weights) -> None:
    async with weights.begin() as update:
        await update.stage_elements(NORM, [0], [5.0])
        await update._stager.settle()
        for name in ("a", "b"):
            await rig.stop(name)
            await rig.start(name)
        for server in rig.running.values():
            assert [one.tx for one in server._staging.transactions]
            await server._upkeep.reclaim()
        done = await update.commit()
    assert (await tensors(rig, done.root))[NORM][0] == 5.0


async def test_a_lost_answer_to_a_stage_holds_up_neither_the_update_nor_others(
    rig: ParamServers, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers have opened streams then that nobody knows of, here as many as they take at once."""
    monkeypatch.setattr(staging, "_BEGINS_S", 0.3)
    await weights.history()
    call, lost = weights._bus.call, 0

    async def losing(to: Any, message: Any, ctx: Any) -> Any:
        nonlocal lost
        reply = await call(to, message, ctx)
        if isinstance(message, Stage) and lost < 2 * staging._AT_ONCE:
            lost += 1
            raise Unavailable("the connection broke before the answer came")
        return reply

    monkeypatch.setattr(weights._bus, "call", losing)
    async with weights.begin(timeout_s=60.0) as update:
        await update.stage_elements(NORM, [0], [5.0])
        done = await update.commit()
    assert lost == 2 * staging._AT_ONCE
    assert (await tensors(rig, done.root))[NORM][0] == 5.0
    for server in rig.running.values():
        await until(lambda server=server: not server._staging._taking)


async def test_with_one_of_two_servers_gone_the_update_goes_to_the_other_and_is_copied_later(
    rig: ParamServers, weights: Weights
) -> None:
    await rig.stop("b")
    async with weights.begin() as update:
        await update.stage_elements(NORM, [0], [5.0])
        done = await update.commit()
    await rig.start("b")
    await until(lambda: done.root in rig.running["b"]._upkeep.roots)
    await rig.stop("a")
    assert (await tensors(rig, done.root))[NORM][0] == 5.0


async def test_what_can_not_be_pushed_is_refused_with_the_reason(weights: Weights) -> None:
    await _head(weights)
    async with weights.begin() as update:
        with pytest.raises(NotFound, match="no tensor"):
            await update.stage("nothing.weight", np.zeros(3, np.float32))
        with pytest.raises(InvalidRequest, match="shape"):
            await update.stage(Q0, np.zeros(3, np.float32))
        with pytest.raises(InvalidRequest, match="finite"):
            await update.stage_elements(NORM, [0], [np.nan])
        with pytest.raises(InvalidRequest, match="twice"):
            await update.stage_elements(NORM, [0, 0], [1.0, 2.0])
        with pytest.raises(InvalidRequest, match="indices are 0 to"):
            await update.stage_rows(Q0, [10**6], np.zeros((1, 1), np.float32))
        with pytest.raises(InvalidRequest, match="does not fit"):
            await update.stage_low_rank(Q0, np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32))


async def test_a_rollback_and_forgetting(rig: ParamServers, weights: Weights) -> None:
    first = await _head(weights)
    await weights.move_ref("stable", first.hex(), now=True)
    async with weights.begin() as update:
        await update.stage_elements(NORM, [0], [5.0])
        second = (await update.commit()).root
    await weights.move_ref("stable", second.hex(), now=True)
    with pytest.raises(Conflict, match="in use"):
        await weights.forget([second])
    assert await weights.rollback(now=True) == first
    assert await weights.forget() == (second,)
    with pytest.raises(NotFound):
        await weights.resolve(second.hex())
    for server in rig.running.values():
        await until(lambda server=server: second not in server._store)


@pytest.mark.parametrize("durable", [True, False])
async def test_a_commit_that_gets_no_answer_is_told_as_what_became_of_it(
    weights: Weights, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """Its answer is lost until the deadline: whether it or its abort is in the log first decides."""
    await weights.history()
    append = weights._bus.logs.append

    async def lost(to: Any, entry: LogEntry, **options: Any) -> int:
        if not entry.commit:
            return await append(to, entry, **options)
        if durable:
            await append(to, entry, **options)
        raise DeadlineExceeded("no answer came")

    monkeypatch.setattr(weights._bus.logs, "append", lost)
    async with AsyncExitStack() as stack:
        update = await stack.enter_async_context(weights.begin())
        await update.stage(NORM, np.full(64, 3.0, np.float32))
        if durable:
            committed = await update.commit()
            assert (await weights.history()).head("stable") == committed.root
        else:
            with pytest.raises(DeadlineExceeded):
                await update.commit()
            monkeypatch.undo()
            assert (await weights.history()).head("stable") == update.parent
            with pytest.raises(Conflict):
                await update.commit()  # however late it comes


async def test_what_changes_before_it_has_travelled_is_noticed(rig: ParamServers, weights: Weights) -> None:
    head = await _head(weights)
    async with weights.begin() as update:
        values = np.ones(update.tensor(Q0).shape, np.float32)
        await update.stage(Q0, values)
        values[0, 0] = 2.0
        with pytest.raises(InvalidRequest, match=rf"{Q0} changed while it was being pushed"):
            await update.commit()
    assert await _head(weights) == head
