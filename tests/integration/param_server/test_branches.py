"""Staging branches on a real bus: writers without locks, seals beside transactions, full branches, the command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from pdbus.bus import stream_configs
from pdbus.bus.bus import connect
from pdbus.client.weights import Weights
from pdbus.errors import Conflict, InvalidRequest, NotFound, Overloaded
from pdbus.messages.updates import BranchEntry
from pdbus.subjects import BRANCH
from tests.support.checkpoints import tiny_checkpoint
from tests.support.param_servers import ParamServers, tensors

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"


@pytest.fixture
async def rig(
    nats_url: str, tmp_path: Path, unique: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ParamServers]:
    async with AsyncExitStack() as life:
        rig = ParamServers(nats_url, unique("branches"), tmp_path, life)
        await rig.start("a", tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama"))
        yield rig


@pytest.fixture
async def weights(rig: ParamServers) -> AsyncIterator[Weights]:
    async with connect(rig.url, name="pusher") as bus:
        weights = Weights(bus, rig.model)
        yield weights
        await weights.close()


async def test_writers_push_and_seals_make_versions(rig: ParamServers, weights: Weights) -> None:
    old = await tensors(rig, (await weights.history()).heads["stable"])
    branch, rows = weights.branch("hogwild"), old[EMBED].shape[0]
    width = old[EMBED].shape[1]

    async def write(writer: int) -> None:
        mine = weights.branch("hogwild")
        for step in range(10):
            row = (writer * 10 + step) % rows
            await mine.push(EMBED, np.full((1, width), writer + 1, np.float32), rows=[row])
            await mine.add(NORM, [1.0], elements=[3])

    async with asyncio.TaskGroup() as group:
        for writer in range(4):
            group.create_task(write(writer))
    await branch.push(NORM, old[NORM] * 2)
    await branch.add(NORM, np.float32(1) * np.ones_like(old[NORM]))
    first = await branch.seal(message="a night of steps")
    assert (first.entries, first.void, first.rebased) == (82, 0, ())
    new = await tensors(rig, first.root)
    assert np.array_equal(new[NORM], old[NORM] * 2 + 1)
    assert sorted(new[EMBED][:, 0][:40].tolist()) == sorted([1.0, 2.0, 3.0, 4.0] * 10)
    with pytest.raises(NotFound, match="nothing"):
        await branch.seal()
    await branch.push(NORM, [7.0], elements=[0])
    cut = await branch.push(NORM, [8.0], elements=[1])
    await branch.push(NORM, [9.0], elements=[2])
    second = await branch.seal(upto=cut)
    assert (await tensors(rig, second.root))[NORM][:3].tolist() == [7.0, 8.0, new[NORM][2]]
    commit = (await weights.lineage(second.root.hex())).commit
    assert commit.parent == first.root
    assert commit.sealed
    assert (commit.sealed.after, commit.sealed.upto) == (first.upto, cut)
    (state,) = await weights.branches()
    assert (state.name, state.entries, state.sealed) == ("hogwild", 1, commit.sealed)
    assert await branch.drop() == 1
    with pytest.raises(NotFound):
        await branch.seal()


async def test_a_transaction_in_between_rebases_a_seal_and_of_two_seals_one_wins(
    rig: ParamServers, weights: Weights
) -> None:
    old = await tensors(rig, (await weights.history()).heads["stable"])
    branch = weights.branch("beside")
    await branch.add(NORM, [1.0], elements=[0])
    await branch.push(NORM, [5.0], elements=[1])
    between: list[bytes] = []
    weights_begin = weights.update

    async def update_then_commit(terms, deadline, shared=None, part=(0, 1)):  # type: ignore[no-untyped-def]
        made = await weights_begin(terms, deadline, shared, part)
        if terms.sealed and not between:
            commit = made.commit

            async def late():  # type: ignore[no-untyped-def]
                async with weights.begin(message="in between") as other:
                    await other.stage_elements(NORM, [0, 2], [10.0, 20.0])
                    between.append((await other.commit()).root)
                return await commit()

            made.commit = late
        return made

    weights.update = update_then_commit  # type: ignore[method-assign]
    sealed = await branch.seal()
    assert sealed.rebased == tuple(between)
    norm = (await tensors(rig, sealed.root))[NORM]
    assert norm[:4].tolist() == [11.0, 5.0, 20.0, old[NORM][3]]
    weights.update = weights_begin  # type: ignore[method-assign]

    await branch.add(NORM, [1.0], elements=[0])
    outcomes = await asyncio.gather(branch.seal(), weights.branch("beside").seal(), return_exceptions=True)
    won = [one for one in outcomes if not isinstance(one, BaseException)]
    assert len(won) == 1
    (lost,) = [one for one in outcomes if isinstance(one, BaseException)]
    assert isinstance(lost, Conflict | NotFound), lost
    assert (await tensors(rig, won[0].root))[NORM][0] == 12.0
    assert (await weights.history()).heads["stable"] == won[0].root


async def test_what_does_not_fit_is_refused_and_what_came_anyway_is_void(rig: ParamServers, weights: Weights) -> None:
    branch = weights.branch("void")
    with pytest.raises(NotFound):
        await branch.push("nothing.weight", [1.0], elements=[0])
    with pytest.raises(InvalidRequest, match="shape"):
        await branch.push(NORM, [1.0])
    with pytest.raises(InvalidRequest, match="not both"):
        await branch.push(NORM, [1.0], rows=[0], elements=[0])
    with pytest.raises(InvalidRequest, match="can't name"):
        weights.branch("a.b/c")
    to = BRANCH(model=rig.model, branch="void")
    await weights._bus.logs.append(to, BranchEntry("nothing.weight", "set", "elements", bytes(8), bytes(4)))
    weights._bus.transport.send(to.name, b"\xc1 garbage")
    await weights._bus.transport.barrier()
    await branch.push(NORM, [4.0], elements=[0])
    sealed = await branch.seal()
    assert (sealed.entries, sealed.void) == (2, 1)
    assert (await tensors(rig, sealed.root))[NORM][0] == 4.0


async def test_a_full_branch_refuses_and_says_so(
    rig: ParamServers, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sealed, but not purged, makes room by itself."""
    monkeypatch.setattr(stream_configs, "BRANCH_ENTRIES", 3)
    await weights._bus.logs.ensure()
    try:
        branch = weights.branch("full")
        for _ in range(3):
            await branch.add(NORM, [1.0], elements=[0])
        with pytest.raises(Overloaded, match="seal it"):
            await branch.add(NORM, [1.0], elements=[0])

        async def dies(*_: object, **__: object) -> None:
            raise Overloaded("a sealer that died before it had purged")

        with monkeypatch.context() as patched:
            patched.setattr(type(weights._bus.logs), "purge", dies)
            sealed = await branch.seal()
        assert (await weights.branches())[0].entries == 3
        await branch.add(NORM, [1.0], elements=[0])
        again = await branch.seal()
        assert (sealed.entries, again.entries) == (3, 1)
        old, new = (await tensors(rig, sealed.root))[NORM][0], (await tensors(rig, again.root))[NORM][0]
        assert new == old + 1
    finally:
        monkeypatch.undo()
        await weights._bus.logs.ensure()
