"""Logs and work queues on a real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from pdbus.bus.bus import Bus, connect, memory_bus
from pdbus.bus.follower import Follower, Record
from pdbus.bus.memory import MemoryBroker
from pdbus.bus.nats import NatsTransport
from pdbus.context import Deadline
from pdbus.errors import Conflict, Corrupt, NotFound, Unavailable
from pdbus.messages.changelog import LogEntry, Ref
from pdbus.messages.invalidator import DueDelete
from pdbus.stack.nats_server import embedded_nats
from pdbus.subjects import CANCEL, CHANGELOG, DELETES
from tests.support.until import until

Unique = Callable[[str], str]


def entry(text: str) -> LogEntry:
    return LogEntry(ref=Ref("stable", bytes(32), "test", text))


def reminder(cause: int) -> DueDelete:
    return DueDelete("m", bytes(32), 1, False, cause)


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with connect(nats_url, name="test") as bus:
        await bus.logs.ensure()
        yield bus


async def texts(follower: Follower[LogEntry], count: int) -> list[str]:
    async with asyncio.timeout(30):
        records = [await anext(follower) for _ in range(count)]
    return [record.entry.ref.message for record in records if record.entry.ref]


async def test_a_follower_gets_what_was_and_what_comes_in_order(bus: Bus, unique: Unique) -> None:
    to, other = CHANGELOG(model=unique("m/1")), CHANGELOG(model=unique("o"))
    assert await bus.logs.last_seq(to) == 0
    seqs = []
    for text in "abc":
        seqs.append(await bus.logs.append(to, entry(text)))
        await bus.logs.append(other, entry("not for us"))
    assert await bus.logs.last_seq(to) == seqs[-1]
    async with bus.logs.follow(to) as follower:
        assert await texts(follower, 3) == ["a", "b", "c"]
        assert follower.seq == seqs[-1]
        live = asyncio.create_task(anext(follower))
        await bus.logs.append(to, entry("d"))
        record: Record[LogEntry] = await live
        assert record.entry == entry("d")
        assert abs(time.time_ns() - record.time_ns) < 60e9
    async with bus.logs.follow(to, after=seqs[0]) as late:
        assert await texts(late, 3) == ["b", "c", "d"]


async def test_a_follower_confirms_that_it_is_at_the_end(bus: Bus, unique: Unique) -> None:
    to = CHANGELOG(model=unique("m"))
    async with bus.logs.follow(to) as follower:
        before = time.monotonic()
        waiting = asyncio.create_task(anext(follower))
        await until(lambda: follower.confirmed_at >= before + 0.5)  # so it confirms again and again
        assert follower.confirmed_at <= time.monotonic()
        await bus.logs.append(to, entry("a"))
        assert (await waiting).entry == entry("a")


async def test_compare_and_append(bus: Bus, unique: Unique) -> None:
    to = CHANGELOG(model=unique("m"))
    first = await bus.logs.append(to, entry("a"), expected_seq=0)
    with pytest.raises(Conflict):
        await bus.logs.append(to, entry("b"), expected_seq=0)
    second = await bus.logs.append(to, entry("b"), expected_seq=first)
    assert second > first
    outcomes = await asyncio.gather(
        *(bus.logs.append(to, entry(str(n)), expected_seq=second) for n in range(8)), return_exceptions=True
    )
    assert sum(isinstance(outcome, int) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 7


async def test_an_append_that_is_repeated_counts_once(bus: Bus, unique: Unique) -> None:
    to = CHANGELOG(model=unique("m"))
    first = await bus.logs.append(to, entry("a"), expected_seq=0, message_id=unique("tx"))
    tx = unique("tx")
    second = await bus.logs.append(to, entry("b"), expected_seq=first, message_id=tx)
    await bus.logs.append(to, entry("c"))
    assert await bus.logs.append(to, entry("b"), expected_seq=first, message_id=tx) == second
    assert await bus.logs.append(to, entry("b"), message_id=tx) == second
    with pytest.raises(Conflict):  # another's entry came next, so this one never made it
        await bus.logs.append(to, entry("x"), expected_seq=first, message_id=unique("tx"))
    async with bus.logs.follow(to) as follower:
        assert await texts(follower, 3) == ["a", "b", "c"]


async def test_a_malformed_entry_is_counted_and_passed_over(bus: Bus, unique: Unique) -> None:
    to = CHANGELOG(model=unique("m"))
    await bus.logs.append(to, entry("a"))
    assert isinstance(bus.transport, NatsTransport)
    await bus.transport.client.jetstream().publish(to.name, b"\xc1 garbage")
    await bus.logs.append(to, entry("b"))
    async with bus.logs.follow(to) as follower:
        assert await texts(follower, 2) == ["a", "b"]
    assert bus.malformed == 1


async def test_appends_and_followers_outlast_a_restart(tmp_path: Path) -> None:
    to = CHANGELOG(model="m")
    async with embedded_nats(tmp_path / "nats") as server:
        scope = connect(server.url, name="test")
        bus = await scope.__aenter__()
        await bus.logs.ensure()
        await bus.logs.append(to, entry("before"))
        follower = bus.logs.follow(to)
        assert await texts(follower, 1) == ["before"]
        waiting = asyncio.create_task(texts(follower, 1))
    append = asyncio.create_task(bus.logs.append(to, entry("after"), deadline=Deadline.after(30)))
    async with embedded_nats(tmp_path / "nats", port=int(server.url.rpartition(":")[2])):
        await append
        assert await waiting == ["after"]
        await scope.__aexit__(None, None, None)


async def test_a_log_made_anew_is_never_taken_for_the_old_one(tmp_path: Path) -> None:
    to = CHANGELOG(model="m")
    async with embedded_nats(tmp_path / "nats") as server, connect(server.url, name="test") as bus:
        await bus.logs.ensure()
        for text in "abc":
            await bus.logs.append(to, entry(text))
        async with bus.logs.follow(to) as follower:
            assert await texts(follower, 3) == ["a", "b", "c"]
            waiting = asyncio.create_task(texts(follower, 1))
            assert isinstance(bus.transport, NatsTransport)
            await bus.transport.client.jetstream().delete_stream(CHANGELOG.stream)
            with pytest.raises(NotFound):
                await bus.logs.last_seq(to)
            await bus.logs.ensure()
            await bus.logs.append(to, entry("another history"))
            with pytest.raises(Corrupt):
                await waiting


async def test_without_a_stream_an_append_is_unavailable_in_time(tmp_path: Path) -> None:
    async with embedded_nats(tmp_path / "nats") as server, connect(server.url, name="test") as bus:
        with pytest.raises(Unavailable):
            await bus.logs.append(CHANGELOG(model="m"), entry("a"), deadline=Deadline.after(0.3))


async def test_work_goes_to_one_worker_and_is_gone_when_done(bus: Bus, nats_url: str, unique: Unique) -> None:
    to = DELETES(model=unique("m.1"))
    for cause in range(20):
        await bus.logs.enqueue(to, reminder(cause), message_id=f"{to.name}-{cause}")
    await bus.logs.enqueue(to, reminder(0), message_id=f"{to.name}-0")  # a repetition counts once
    seen: list[int] = []

    async def work(worker: Bus) -> None:
        async with aclosing(worker.logs.work(to)) as jobs:
            async for job in jobs:
                await job.done()
                seen.append(job.message.cause)

    async with connect(nats_url, name="other") as other:
        workers = [asyncio.create_task(work(each)) for each in (bus, other)]
        await until(lambda: len(seen) >= 20)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    assert sorted(seen) == list(range(20))


async def test_work_put_off_comes_again_and_not_before(bus: Bus, unique: Unique) -> None:
    to = DELETES(model=unique("m"))
    await bus.logs.enqueue(to, reminder(1))
    async with asyncio.timeout(30), aclosing(bus.logs.work(to)) as jobs:
        job, before_s = await anext(jobs), time.monotonic()
        await job.later(0.5)
        again = await anext(jobs)
        assert time.monotonic() - before_s > 0.49
        assert again.message == reminder(1)
        await again.done()


async def test_unfinished_work_goes_to_the_next_worker_at_once(bus: Bus, unique: Unique) -> None:
    to = DELETES(model=unique("m"))
    await bus.logs.enqueue(to, reminder(1))
    async with asyncio.timeout(30):
        async with aclosing(bus.logs.work(to)) as jobs:
            await anext(jobs)  # and dies of something
        async with aclosing(bus.logs.work(to)) as jobs:
            job = await anext(jobs)
            assert job.message == reminder(1)
            await job.done()


async def test_malformed_work_is_counted_and_removed(bus: Bus, unique: Unique) -> None:
    to = DELETES(model=unique("m"))
    assert isinstance(bus.transport, NatsTransport)
    await bus.transport.client.jetstream().publish(to.name, b"\xc1 garbage")
    await bus.logs.enqueue(to, reminder(2))
    async with asyncio.timeout(30), aclosing(bus.logs.work(to)) as jobs:
        job = await anext(jobs)
        assert job.message == reminder(2)
        await job.done()
    assert bus.malformed == 1


async def test_kinds_are_not_confused(bus: Bus) -> None:
    with pytest.raises(TypeError):
        await bus.logs.last_seq(CANCEL())
    with pytest.raises(TypeError):
        bus.logs.follow(DELETES(model="m"))
    with pytest.raises(TypeError):
        bus.logs.work(CHANGELOG(model="m"))


async def test_the_twin_says_that_it_has_no_logs() -> None:
    async with memory_bus(MemoryBroker()) as twin:
        with pytest.raises(Unavailable):
            _ = twin.logs
