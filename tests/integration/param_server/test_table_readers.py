"""Who follows the log of a sparse table: watchers and rows kept in memory; seals and rollbacks as they see them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pdbus.bus.bus import connect
from pdbus.bus.nats import NatsTransport
from pdbus.client.weights import RowTable
from pdbus.context import RequestContext
from pdbus.errors import NotFound
from pdbus.subjects import ROWS
from tests.support.tables import TableRig, first_column, rows, whole
from tests.support.until import until


async def test_a_watcher_gets_every_update_once_and_in_order(rig: TableRig, table: RowTable) -> None:
    other = await rig.table()
    begun = await table.flush()
    async with other.watch() as now:
        for value in range(5):
            await (await table.update([value, 9], rows(value, value)))
        live = [await anext(now) for _ in range(5)]
        while await jump(rig) < 3:  # the servers' and ours: one that has just been lost is made again
            pass
        await (await table.update(3, rows(33)[0]))
        live.append(await anext(now))
    async with other.watch(after=begun) as past:
        replayed = [await anext(past) for _ in range(6)]
    for batches in (live, replayed):
        assert [batch.ids.tolist() for batch in batches] == [*([value, 9] for value in range(5)), [3]]
        assert [batch.seq for batch in batches] == sorted(batch.seq for batch in live)
        assert batches[4].values[:, 0].tolist() == [4, 4]


async def jump(rig: TableRig) -> int:
    """To all who follow the table's log, something seems to have got lost. Returns how many they are."""
    subject = ROWS(model=rig.model, table="items").name
    async with connect(rig.url, name="faulty") as bus:
        transport = bus.transport
        assert isinstance(transport, NatsTransport)
        found = await transport.client.jetstream().consumers_info("PD_ROWS")
        inboxes = [one.config.deliver_subject for one in found if one.config.filter_subject == subject]
        for inbox in inboxes:
            transport.send(inbox, b"", reply=f"$JS.ACK.PD_ROWS.x.1.{10**9}.{10**9}.0.0")
        await transport.barrier()
        return len(inboxes)


async def test_a_follower_s_rows_are_as_new_as_the_log(rig: TableRig, table: RowTable) -> None:
    ctx = RequestContext.after(30)
    async with (await rig.table()).follower(most_bytes=100 * 1024) as follower:
        ids = np.array([5, 1, 5])
        assert not (await follower.lookup(ids, ctx)).values.any()
        for value in range(1, 20):
            seq = await (await table.update([1, 5], rows(value, -value)))
            found = await follower.lookup(ids, ctx, at_least=seq)
            assert found.values[:, 0].tolist() == [-value, value, -value]
        await until(lambda: follower.seq >= seq)
        misses = follower.misses
        await table.seal()
        assert (await follower.lookup(ids, ctx)).values[:, 0].tolist() == [-19, 19, -19]
        assert follower.misses == misses
        assert np.array_equal((await follower.lookup(np.arange(3_000), ctx)).values, (await whole(table))[:3_000])


async def test_the_log_is_purged_of_what_no_version_needs(rig: TableRig, table: RowTable) -> None:
    weights = await rig.client()
    await table.update(1, rows(1)[0])
    first = await table.flush()
    await table.seal()
    async with table.watch(after=0) as batches:  # the version before the seal is kept for a rollback
        assert (await anext(batches)).seq == first
    await weights.forget()
    await table.update(2, rows(2)[0])
    await table.seal()
    with pytest.raises(NotFound, match=f"are there after {first}"):
        async with table.watch(after=0):
            pass
    async with table.watch(after=first) as batches:
        assert (await anext(batches)).ids.tolist() == [2]
    assert await first_column(table, 1, 2) == [1, 2]


async def test_a_rollback_takes_no_update_back(rig: TableRig, table: RowTable) -> None:
    weights = await rig.client()
    created = (await weights.history()).head("stable")
    assert created
    await table.update([1, 2], rows(1, 2))
    await table.seal()
    await table.update(2, rows(20)[0])
    await table.flush()
    over = asyncio.Event()

    async def update() -> int:
        value = 0
        while not over.is_set():
            value += 1
            await (await table.update(value + 2, rows(value)[0]))
        return value

    updating = asyncio.create_task(update())
    await weights.move_ref("stable", created.hex(), now=True)
    await until(lambda: [fold.root for fold in rig.folds()] == [created, created])
    over.set()
    last = await updating
    expected = [0, 1, 20, *range(1, last + 1)]
    await until(lambda: all(fold.caught_up and fold.seq >= table.seq for fold in rig.folds()))
    for _ in range(6):  # of either server
        assert (await table.lookup(np.arange(len(expected)))).values[:, 0].tolist() == expected
    assert await table.seal() != created
    assert await first_column(table, *range(len(expected))) == expected
