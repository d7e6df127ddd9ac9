"""Updates that several processes make together: one version, or none, and all of them are told the same."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdbus.bus.bus import connect
from pdbus.client.weights import Committed, Update, Weights
from pdbus.errors import Conflict, DeadlineExceeded, InvalidRequest, PdbusError, Unavailable
from tests.support.checkpoints import tiny_checkpoint
from tests.support.param_servers import ParamServers, tensors
from tests.support.until import until

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
Q0, UP1 = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
async def rig(
    nats_url: str, tmp_path: Path, unique: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ParamServers]:
    async with AsyncExitStack() as life:
        rig = ParamServers(nats_url, unique("shared"), tmp_path, life)
        checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")
        await asyncio.gather(rig.start("a", checkpoint), rig.start("b", checkpoint))
        yield rig


@asynccontextmanager
async def trainer(rig: ParamServers) -> AsyncIterator[Weights]:
    """A process of its own, as far as the bus can tell."""
    async with connect(rig.url, name="trainer") as bus:
        weights = Weights(bus, rig.model)
        try:
            yield weights
        finally:
            await weights.close()


@pytest.fixture
async def three(rig: ParamServers) -> AsyncIterator[list[Weights]]:
    async with AsyncExitStack() as life:
        yield [await life.enter_async_context(trainer(rig)) for _ in range(3)]


async def push(
    weights: Weights, part: tuple[int, int], stage: Callable[[Update], Any], tx: str = "step", **terms: Any
) -> Committed | PdbusError:
    """What a part gets or raises."""
    try:
        async with weights.begin(tx=tx, part=part, **terms) as update:
            await stage(update)
            return await update.commit()
    except PdbusError as error:
        return error


def norm(value: float) -> Callable[[Update], Any]:
    return lambda update: update.stage_elements(NORM, [0], [value])


def rows(name: str, value: float) -> Callable[[Update], Any]:
    async def stage(update: Update) -> None:
        await update.stage_rows(name, [1], np.full((1, *update.tensor(name).shape[1:]), value, np.float32))

    return stage


async def nothing(update: Update) -> None:
    return


async def test_three_parts_make_one_version_and_an_id_may_be_used_again(
    rig: ParamServers, three: list[Weights]
) -> None:
    before = (await three[0].history()).heads["stable"]
    old = await tensors(rig, before)
    for step in (1.0, 2.0):
        stages = [norm(step), rows(EMBED, step), rows(UP1, step)]
        got = await asyncio.gather(
            *(push(weights, (i, 3), stages[i], message=f"step {step}") for i, weights in enumerate(three))
        )
        done = got[0]
        assert isinstance(done, Committed)
        assert got == [done] * 3
        new = await tensors(rig, done.root)
        assert {name for name in new if not np.array_equal(new[name], old[name])} == {NORM, EMBED, UP1}
        assert [new[NORM][0], new[EMBED][1, 0], new[UP1][1, 0]] == [step] * 3
    lineage = await three[2].lineage(done.root.hex())
    assert lineage.commit.message == "step 2.0"
    assert lineage.commit.parent != before
    same = await asyncio.gather(*(push(weights, (i, 3), nothing) for i, weights in enumerate(three)))
    assert same == [Committed(done.root, done.seq, 0, 0)] * 3
    for server in rig.running.values():
        await until(lambda server=server: not list(server._staging.transactions))


async def test_what_one_part_can_not_do_all_are_told_alike(rig: ParamServers, three: list[Weights]) -> None:
    head = (await three[0].history()).heads["stable"]

    async def outcomes(*stages: Callable[[Update], Any]) -> list[Committed | PdbusError]:
        """Each part stages once all have joined: whoever has not waits for another part 0."""
        joined = asyncio.Barrier(3)

        def together(stage: Callable[[Update], Any]) -> Callable[[Update], Any]:
            async def staging(update: Update) -> None:
                await joined.wait()
                await stage(update)

            return staging

        parts = (push(three[i], (i, 3), together(stage), timeout_s=60.0) for i, stage in enumerate(stages))
        return list(await asyncio.gather(*parts))

    def alike(got: list[Committed | PdbusError], kind: type[PdbusError], text: str) -> None:
        assert {type(one).code for one in got if isinstance(one, PdbusError)} == {kind.code}, got
        assert len(got) == 3
        assert all(text in str(one) for one in got), got

    alike(
        await outcomes(norm(1), rows(EMBED, 1), rows(EMBED, 2)),
        InvalidRequest,
        f"{EMBED} was staged by part 1 and part 2",
    )
    alike(await outcomes(norm(1), norm(1), rows(Q0, 2)), InvalidRequest, f"{NORM} was staged by part 0 and part 1")

    async def fails(update: Update) -> None:
        raise Conflict("the optimizer diverged")

    alike(await outcomes(norm(1), rows(EMBED, 1), fails), Conflict, "diverged")
    alike(await outcomes(fails, rows(EMBED, 1), norm(1)), Conflict, "diverged")

    late = asyncio.Event()

    async def waits(update: Update) -> None:
        await late.wait()

    stages = (norm(1), rows(EMBED, 1), waits)  # not together: on a busy machine some join after the deadline
    pending = asyncio.gather(*(push(three[i], (i, 3), stage, timeout_s=1.5) for i, stage in enumerate(stages)))
    await until(lambda: any(one.code == "deadline_exceeded" for one in three[2]._follower.history.ended))
    late.set()
    got = list(await pending)
    await until(lambda: not list(rig.running["a"]._staging.transactions))
    alike(got, DeadlineExceeded, "")

    async def overtaken(update: Update) -> None:
        async with three[0].begin() as other:
            await norm(7)(other)
            await other.commit()

    alike(await outcomes(overtaken, rows(EMBED, 1), nothing), Conflict, "has moved on to")
    assert (await three[0].history()).roots[(await three[0].history()).heads["stable"]].commit.parent == head  # type: ignore[union-attr]


async def test_strangers_are_kept_out(rig: ParamServers, three: list[Weights]) -> None:
    async with three[0].begin(tx="step", part=(0, 2), message="step 8") as update:
        await norm(8)(update)
        stranger = await push(three[1], (1, 2), nothing, message="step 7")
        assert isinstance(stranger, InvalidRequest)
        assert "another update" in str(stranger)
        second = await push(three[1], (0, 2), nothing, message="step 8")
        assert isinstance(second, Conflict)
        async with asyncio.TaskGroup() as group:
            other = group.create_task(push(three[1], (1, 2), rows(EMBED, 8), message="step 8"))
            done = await update.commit()
        assert other.result() == done
    alone = await push(three[1], (1, 2), nothing, timeout_s=0.3)
    assert isinstance(alone, DeadlineExceeded)
    refused = await push(three[1], (2, 2), nothing)
    assert isinstance(refused, InvalidRequest)


async def test_a_part_that_was_begun_anew_is_not_taken_for_its_former_life(
    rig: ParamServers, three: list[Weights]
) -> None:
    """The former life was killed: it says nothing more. The update that it was in does not go on with the new one."""
    async with asyncio.timeout(100):
        leading = asyncio.create_task(push(three[0], (0, 2), norm(1)))
        dying = three[1].begin(tx="step", part=(1, 2))
        await rows(EMBED, 1)(await dying.__aenter__())
        again = asyncio.create_task(push(three[2], (1, 2), rows(EMBED, 2)))
        first = await leading
        assert isinstance(first, Conflict)
        assert "begun anew" in str(first)
        second = await push(three[0], (0, 2), norm(2))
        assert isinstance(second, Committed)
        assert await again == second
    assert (await tensors(rig, second.root))[EMBED][1, 0] == 2.0


PART = """
import asyncio, json, sys
import numpy as np
from pdbus.client import connect

async def main(url, model, tx, number, name, until):
    async with connect(url, model) as client:
        await client.weights.history()
        print("ready", flush=True)
        sys.stdin.readline()
        async with client.weights.begin(tx=tx, part=(number, 2), timeout_s=90.0) as update:
            print("begun", flush=True)
            if until == "begun": await asyncio.sleep(60)
            await update.stage_rows(name, [1], np.full((1, *update.tensor(name).shape[1:]), 5, np.float32))
            print("staged", flush=True)
            if until == "staged": await asyncio.sleep(60)
            done = await update.commit()
            print(json.dumps(done.root.hex()), flush=True)

asyncio.run(main(*sys.argv[1:4], int(sys.argv[4]), *sys.argv[5:]))
"""


@pytest.mark.timeout(400)
async def test_killed_processes_leave_the_old_version_and_the_others_are_told(
    rig: ParamServers, three: list[Weights]
) -> None:
    """Part 0, and then another part, is killed after it has staged; the one that is left hears of it in time."""

    async def start(tx: str, number: int, name: str, until: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", PART, rig.url, rig.model, tx, str(number), name, until,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=dict(os.environ),
        )  # fmt: skip

    def go(process: asyncio.subprocess.Process) -> None:
        assert process.stdin
        process.stdin.write(b"go\n")

    async def said(process: asyncio.subprocess.Process) -> str:
        assert process.stdout
        return (await asyncio.wait_for(process.stdout.readline(), 100)).decode().strip()

    async def without(victim: int, timeout_s: float = 6.0) -> None:
        child = await start(f"without {victim}", victim, EMBED, "staged")
        assert await said(child) == "ready"
        go(child)
        terms = {"tx": f"without {victim}", "timeout_s": timeout_s}
        left = asyncio.create_task(push(three[victim], (1 - victim, 2), norm(1), **terms))
        steps = [await said(child), await said(child)]
        if child.returncode is None:
            child.kill()
        await child.wait()
        error = await asyncio.wait_for(left, 100)
        assert isinstance(error, DeadlineExceeded | Unavailable), error
        if steps != ["begun", "staged"]:
            assert timeout_s < 60, steps
            await without(victim, 5 * timeout_s)  # that was too early for a busy machine

    async def together() -> None:
        children = [await start("together", 0, EMBED, ""), await start("together", 1, UP1, "")]
        assert [await said(child) for child in children] == ["ready", "ready"]
        for child in children:
            go(child)
        told = [[await said(child) for _ in range(3)][2] for child in children]
        assert [await child.wait() for child in children] == [0, 0]
        assert told[0] == told[1]
        new = await tensors(rig, bytes.fromhex(json.loads(told[0])))
        assert [new[EMBED][1, 0], new[UP1][1, 0]] == [5.0, 5.0]
        assert np.array_equal(new[NORM], old[NORM])

    old = await tensors(rig, (await three[0].history()).heads["stable"])
    await asyncio.gather(without(0), without(1), together())
    for server in rig.running.values():
        await until(lambda server=server: not list(server._staging.transactions))
