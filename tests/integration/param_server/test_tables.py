"""Sparse tables on real param-servers: what is written, what is read, and what a seal leaves as it was."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from pdbus.bus.bus import connect
from pdbus.client.weights import RowTable
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Conflict, InvalidRequest, NotFound, TooLarge, Unavailable
from pdbus.messages.rows import TableRead
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader
from pdbus.subjects import ROWS, TABLE_READ
from pdbus.weights.tables import encoded_ids, tables
from tests.support.checkpoints import tiny_checkpoint
from tests.support.late import late
from tests.support.tables import ROWS_OF_ALL, WIDTH, TableRig, first_column, in_blocks, rows, whole
from tests.support.until import until


async def test_rows_are_what_was_written_last_and_zero_before(rig: TableRig, table: RowTable) -> None:
    assert not (await table.lookup([0, ROWS_OF_ALL - 1])).values.any()
    assert await (await table.update(7, rows(1)[0])) == await (await table.update([8, 9, 8], rows(2, 3, 4))) - 1
    assert await first_column(table, 9, 8, 7, 8, 6) == [3, 4, 1, 4, 0]
    other = await rig.table()
    seq = await table.flush()
    found = await other.lookup([8], at_least=seq)
    assert (found.values[0, 0], found.seq) == (4, seq)
    everything = np.zeros((ROWS_OF_ALL, WIDTH), np.float32)
    everything[[7, 8, 9]] = rows(1, 4, 3)
    assert np.array_equal(await whole(table), everything)  # too much for a message: by bulk
    assert (await other.lookup([])).values.shape == (0, WIDTH)


async def test_a_table_may_be_made_of_values_and_zeros_do_not_travel(rig: TableRig) -> None:
    weights = await rig.client()
    values = np.random.default_rng(0).normal(size=(9_000, WIDTH)).astype(np.float32)
    await weights.table("given").create(9_000, WIDTH, init=values)
    await weights.table("made").create(9_000, WIDTH, init=lambda first, count: values[first : first + count])
    zeros = await weights.table("zeros").create(1_000_000, WIDTH)
    assert zeros.sent_bytes < 50_000
    for name in ("given", "made"):
        assert np.array_equal((await weights.table(name).lookup(np.arange(9_000))).values, values)
    assert not (await weights.table("zeros").lookup([0, 999_999])).values.any()
    with pytest.raises(Conflict, match="there is a table"):
        await weights.table("given").create(5, 5)
    with pytest.raises(InvalidRequest, match="shape"):
        await weights.table("wrong").create(5, 5, init=values)


async def test_a_seal_changes_no_row_and_leaves_nothing_above_its_blocks(rig: TableRig, table: RowTable) -> None:
    ids = np.random.default_rng(1).integers(0, ROWS_OF_ALL, 3_000)
    await table.update(ids, np.random.default_rng(2).normal(size=(3_000, WIDTH)).astype(np.float32))
    await table.flush()
    before = await whole(table)
    root = await table.seal()
    assert np.array_equal(await in_blocks(rig, root), before)
    await until(lambda: [fold.pending for fold in rig.folds()] == [0, 0])
    assert np.array_equal(await whole(await rig.table()), before)
    assert await table.seal() == root  # nothing to do
    await table.update(3, rows(5)[0])
    await table.flush()
    assert await first_column(table, 3) == [5]
    assert [fold.root for fold in rig.folds()] == [root, root]
    history = await (await rig.client()).history()
    commit = history.roots[root].commit
    assert commit
    assert f"up to {rig.folds()[0].table.seal.seq}" in commit.message
    assert [layer for layer, _ in commit.layers] == ["table.items"]


async def test_updates_and_other_commits_during_seals_are_not_lost(rig: TableRig, table: RowTable) -> None:
    weights = await rig.client()
    expected = np.zeros(ROWS_OF_ALL, np.float32)
    over = asyncio.Event()

    async def update() -> None:
        rng = np.random.default_rng(3)
        while not over.is_set():
            ids, values = rng.integers(0, ROWS_OF_ALL, 20), rng.normal(size=20).astype(np.float32)
            expected[ids] = values
            await (await table.update(ids, rows(*values)))

    async def change() -> None:
        while True:
            try:
                async with weights.begin() as update:
                    await update.stage_elements("model.norm.weight", [0], [2.0])
                    await update.commit()
                return
            except Conflict:  # a seal came first
                await weights.history()

    updating = asyncio.create_task(update())
    others = [await rig.table(), await rig.table()]
    before = len((await weights.history()).roots)
    await asyncio.gather(*(other.seal() for other in others), change())
    over.set()
    await updating
    last, again = await asyncio.gather(*(other.seal() for other in others))
    assert last == again
    assert (await whole(table))[:, 0].tolist() == expected.tolist()
    assert (await in_blocks(rig, last))[:, 0].tolist() == expected.tolist()
    assert (await in_blocks(rig, last, "model.norm.weight"))[0] == 2.0
    assert len((await weights.history()).roots) - before <= 4  # a seal that came second had little or nothing to do


async def test_a_server_that_was_away_catches_up_before_it_answers(rig: TableRig, table: RowTable) -> None:
    await table.update([1, 2], rows(1, 2))
    await table.flush()
    await rig.stop("b")
    await table.update([2, 3], rows(20, 30))
    await table.seal()
    await table.update(3, rows(31)[0])
    seq = await table.flush()
    assert await first_column(table, 1, 2, 3) == [1, 20, 31]  # the other one answers
    await rig.start("b")
    ctx = RequestContext.after(30)
    async with connect(rig.url, name="asks") as bus:
        while True:
            try:
                to = TABLE_READ(model=rig.model, server=rig.id("b"))
                reply = await bus.call(to, TableRead("items", encoded_ids(np.array([1, 2, 3]))), ctx)
                break
            except (NotFound, Unavailable):  # it says so while it doesn't know all
                await asyncio.sleep(0.01)
    found = np.frombuffer(reply.values, "<f4").reshape(3, WIDTH)
    assert (found[:, 0].tolist(), reply.seq) == ([1, 20, 31], seq)


async def test_a_new_checkpoint_of_the_model_keeps_its_tables(rig: TableRig, table: RowTable, tmp_path: Path) -> None:
    await table.update([3, 4], rows(1, 2))
    await table.seal()
    await table.update(4, rows(5)[0])
    await table.flush()
    weights = await rig.client()
    before = (await weights.history()).head("stable")
    rig.checkpoint = tiny_checkpoint(tmp_path / "other", "llama", seed=2)
    for name in ("a", "b"):
        await rig.stop(name)
    for name in ("a", "b"):
        await rig.start(name)
    history = await weights.history()
    head = history.head("stable")
    assert head
    commit = history.roots[head].commit
    assert commit
    assert commit.parent == before
    assert "table.items" not in dict(commit.layers), "it is as it was"
    assert await first_column(await rig.table(), 3, 4) == [1, 5]

    sealed = await table.seal()
    assert sealed != head
    async with weights.begin() as update:
        await update.stage_elements("model.norm.weight", [0], [5.0])
        pushed = (await update.commit()).root
    await rig.stop("a")
    await rig.start("a")
    await rig.start("c")  # one that has never seen the checkpoint
    assert (await weights.history()).head("stable") == pushed, "nobody's wish is new"
    assert (await in_blocks(rig, pushed))[[3, 4], 0].tolist() == [1, 5]


async def test_a_table_is_dropped_by_a_version_without_it(rig: TableRig, table: RowTable) -> None:
    await table.update(3, rows(1)[0])
    await table.flush()
    weights = await rig.client()
    done = await table.drop()
    assert done
    assert await table.exists() is False
    assert not tables(await weights.manifest(done.root))
    with pytest.raises(NotFound):
        await table.update(3, rows(2)[0])
    assert await table.drop() is None
    to = ROWS(model=rig.model, table="items")
    async with connect(rig.url, name="observer") as bus:
        assert await bus.logs.last_seq(to), "a rollback would still need it"
        older = [root for root in (await weights.history()).roots if root != done.root]
        await weights.move_ref("stable", done.root.hex(), now=True)
        await weights.forget(older)
        assert await table.drop() is None
        assert not await bus.logs.last_seq(to)
    with pytest.raises(NotFound):
        await table.drop()
    await table.create(ROWS_OF_ALL, WIDTH)
    assert await first_column(table, 3) == [0]


async def test_reads_say_how_far_they_are_and_refuse_what_they_can_not_serve(rig: TableRig, table: RowTable) -> None:
    await table.update(1, rows(1)[0])
    seq = await table.flush()
    ctx = RequestContext.after(30)
    async with connect(rig.url, name="asks") as bus:

        async def ask(name: str = "items", ids: object = (1,), at_least: int = 0):  # type: ignore[no-untyped-def]
            to = TABLE_READ(model=rig.model, server=rig.id("a"))
            return await bus.call(to, TableRead(name, encoded_ids(np.array(ids, np.int64)), at_least), ctx)

        while (reply := await ask(at_least=seq)).behind:  # it waits for a tenth of a second only
            pass
        assert (reply.seq, reply.behind, reply.width, len(reply.values)) == (seq, False, WIDTH, 4 * WIDTH)
        reply = await ask(at_least=seq + 1)
        assert (reply.seq, reply.behind, reply.values) == (seq, True, b"")
        with pytest.raises(NotFound, match="no table nothing"):
            await ask("nothing")
        with pytest.raises(InvalidRequest, match="rows 0 to"):
            await ask(ids=[ROWS_OF_ALL])
        with pytest.raises(TooLarge):
            await ask(ids=np.arange(ROWS_OF_ALL))
        bus.transport.send(ROWS(model=rig.model, table="items").name, b"\xc1 garbage")
        bus.transport.send(ROWS(model=rig.model, table="items").name, b"\x82\xa3ids\xc4\x00\xa6values\xc4\x01x")
        await bus.transport.barrier()
    await late("is at sequence", lambda within_s: table.lookup([1], at_least=seq + 100, timeout_s=within_s))
    await table.update(1, rows(2)[0])  # what nobody can read is passed over
    assert await table.flush() == seq + 3
    assert await first_column(table, 1) == [2]


async def test_what_is_no_table_and_who_computes_is_not_concerned(rig: TableRig, table: RowTable) -> None:
    weights = await rig.client()
    head = (await weights.history()).head("stable")
    assert head
    assert tables(await weights.manifest(head)).keys() == {"items"}
    async with connect(rig.url, name="worker") as bus, HistoryFollower(bus, rig.model) as follower:
        await follower.caught_up(Deadline.after(30))
        loaded = await BlockReader(bus, rig.model, follower).tensors(head, RequestContext.after(30))
        assert not any(name.startswith("table.") for name in loaded)
    async with weights.begin() as change:
        with pytest.raises(InvalidRequest, match="update"):
            await change.stage_rows("table.items", [1], rows(1))
    with pytest.raises(NotFound, match="no table nothing"):
        await weights.table("nothing").update(1, rows(1)[0])
    for ids, values in (([ROWS_OF_ALL], rows(1)), ([1], rows(1, 2)), ([-1], rows(1)), ([1], rows(np.nan))):
        with pytest.raises(InvalidRequest):
            await table.update(ids, values)
