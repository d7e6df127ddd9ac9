"""The tail of a log on a real server: what comes, and how its end is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from pdbus.bus.bus import Bus, connect
from pdbus.bus.size_tail import Size
from pdbus.errors import Overloaded
from pdbus.messages.jobs import FileEntry
from pdbus.messages.rows import RowsUpdate
from pdbus.subjects import ANY, FILES, ROWS, ToEvent
from tests.support.until import until


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with connect(nats_url, name="test") as bus:
        await bus.logs.ensure()
        yield bus


@pytest.fixture
def to(unique: Callable[[str], str]) -> ToEvent[RowsUpdate]:
    return ROWS(model=unique("tail"), table="t")


async def test_what_was_there_and_what_comes_in_order_and_once(bus: Bus, to: ToEvent[RowsUpdate]) -> None:
    seqs = [await bus.logs.append(to, RowsUpdate(b"%d" % i, b"")) for i in range(3)]
    taken: list[tuple[int, RowsUpdate | None]] = []
    async with bus.logs.tail(to, seqs[0], lambda seq, entry: taken.append((seq, entry))) as tail:
        await until(lambda: len(taken) == 2)
        other = ROWS(model=to.name.split(".")[3], table="other")
        await asyncio.gather(*(bus.logs.append(to, RowsUpdate(b"%d" % i, b"")) for i in range(3, 200)))
        await bus.logs.append(other, RowsUpdate(b"x", b""))
        bus.transport.send(to.name, b"\xc1 garbage")
        last = await bus.logs.append(to, RowsUpdate(b"end", b""))
        await until(lambda: tail.seq == last)
    assert [seq for seq, _ in taken] == sorted({seq for seq, _ in taken})
    assert len(taken) == 2 + 197 + 2
    assert [entry for _, entry in taken[-2:]] == [None, RowsUpdate(b"end", b"")]


async def test_one_who_can_take_no_more_goes_on_later_where_it_stopped(bus: Bus, to: ToEvent[RowsUpdate]) -> None:
    seqs = [await bus.logs.append(to, RowsUpdate(b"%d" % i, b"")) for i in range(6)]
    taken: list[int] = []
    room = 2

    def take(seq: int, entry: RowsUpdate | None) -> None:
        if len(taken) >= room:
            raise Overloaded("full")
        taken.append(seq)

    after = 0
    for allowed in (2, 4):
        room = allowed
        async with bus.logs.tail(to, after, take) as tail:
            assert isinstance(await tail.lost(), Overloaded)
            after = tail.seq
    assert (taken, after) == (seqs[:4], seqs[3])


async def test_a_missed_entry_ends_it(bus: Bus, to: ToEvent[RowsUpdate]) -> None:
    taken: list[int] = []
    async with bus.logs.tail(to, 0, lambda seq, entry: taken.append(seq)) as tail:
        first = await bus.logs.append(to, RowsUpdate(b"", b""))
        await until(lambda: bool(taken))
        tail._delivered -= 1  # as if the first one had got lost
        await bus.logs.append(to, RowsUpdate(b"", b""))
        assert "missed" in str(await asyncio.wait_for(tail.lost(), 60))
    assert taken == [first]


async def test_a_purge_removes_the_entries_of_one_log_only(bus: Bus, to: ToEvent[RowsUpdate]) -> None:
    other = ROWS(model=to.name.split(".")[3], table="other")
    seqs = [await bus.logs.append(log, RowsUpdate(b"", b"")) for log in (to, other, to, other)]
    await bus.logs.purge(to, upto=seqs[3] - 1)
    taken: list[int] = []
    async with (
        bus.logs.tail(to, 0, lambda seq, entry: taken.append(-seq)),
        bus.logs.tail(other, 0, lambda seq, entry: taken.append(seq)) as tail,
    ):
        await until(lambda: tail.seq == seqs[3])
        end = await bus.logs.append(to, RowsUpdate(b"", b""))
        await until(lambda: -end in taken)
    assert sorted(taken) == [-end, seqs[1], seqs[3]]


async def test_sizes_of_all_subjects_without_what_is_in_them(bus: Bus, unique: Callable[[str], str]) -> None:
    tenant, sizes = unique("sizes"), list[Size]()
    one, other = (FILES(tenant=tenant, file=name) for name in "ab")
    async with bus.logs.sizes(FILES(tenant=tenant, file=ANY), 0, sizes.append):
        await bus.logs.append(one, FileEntry(b"x" * 300_000), reserves=77)
        await bus.logs.append(other, FileEntry(b"y" * 50))
        last = await bus.logs.append(one, FileEntry(deleted=True), replaces=True)
        await until(lambda: len(sizes) == 3)
    assert [(size.subject, size.bytes // 1000, size.replaces, size.reserves) for size in sizes] == [
        (one.name, 300, False, 77), (other.name, 0, False, 0), (one.name, 0, True, 0),
    ]  # fmt: skip
    stored = await bus.logs.next(one, last - 1)
    assert stored is not None
    assert abs(sizes[-1].at_s - stored.time_ns / 1e9) < 0.001
