from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pdbus.bus.bus import Bus, connect
from pdbus.context import Deadline
from pdbus.errors import Conflict, DeadlineExceeded
from pdbus.messages.changelog import Commit, LogEntry, Member, Ref
from pdbus.peers.history import HistoryFollower
from pdbus.stack.nats_server import embedded_nats
from pdbus.subjects import CHANGELOG
from pdbus.weights.history import History

A, B = b"A" * 32, b"B" * 32


def commit(root: bytes, parent: bytes | None = None) -> LogEntry:
    return LogEntry(commit=Commit(root.hex(), root, parent, "me", "", ()))


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with connect(nats_url, name="test") as bus:
        await bus.logs.ensure()
        yield bus


async def test_it_knows_what_was_there_and_what_comes(bus: Bus, unique: Callable[[str], str]) -> None:
    model = unique("history")
    to = CHANGELOG(model=model)
    await bus.logs.append(to, commit(A))
    await bus.logs.append(CHANGELOG(model=unique("history")), commit(B))
    async with HistoryFollower(bus, model) as follower:
        await follower.caught_up(Deadline.after(30))
        assert list(follower.history.roots) == [A]
        seen: list[int] = []
        stop = follower.on_change(lambda history: seen.append(history.seq))
        seq = await bus.logs.append(to, LogEntry(ref=Ref("stable", A, "me")), expected_seq=follower.seq)
        assert await follower.wait_for(lambda history: history.refs, Deadline.after(30)) == {"stable": A}
        assert seen == [seq] == [follower.seq]
        stop()
        await bus.logs.append(to, LogEntry(member=Member("p", "join")))
        await follower.wait_for(lambda history: history.members, Deadline.after(30))
        assert seen == [seq]


async def test_it_confirms_again_and_again_that_nothing_is_beyond(bus: Bus, unique: Callable[[str], str]) -> None:
    async with HistoryFollower(bus, unique("history")) as follower:
        assert follower.confirmed_age_s == float("inf")
        async with asyncio.timeout(30):
            while follower.confirmed_age_s > 5:  # noqa: ASYNC110 - a confirmation is told to nobody
                await asyncio.sleep(0.01)


async def test_waiting_ends_at_the_deadline(bus: Bus, unique: Callable[[str], str]) -> None:
    async with HistoryFollower(bus, unique("history")) as follower:
        with pytest.raises(DeadlineExceeded):
            await follower.wait_for(lambda history: history.refs, Deadline.after(0.1))


async def test_a_callback_that_fails_stops_neither_the_others_nor_the_follower(
    bus: Bus, unique: Callable[[str], str]
) -> None:
    model = unique("history")

    def fails(history: History) -> None:
        raise RuntimeError("mine")

    seen: list[int] = []
    async with HistoryFollower(bus, model) as follower:
        follower.on_change(fails)
        follower.on_change(lambda history: seen.append(history.seq))
        for entry in (commit(A), commit(B, A)):
            await bus.logs.append(CHANGELOG(model=model), entry)
        await follower.wait_for(lambda history: len(history.roots) == 2, Deadline.after(30))
    assert len(seen) == 2


async def test_an_entry_that_cant_be_understood_still_counts_for_a_compare(
    bus: Bus, unique: Callable[[str], str]
) -> None:
    to = CHANGELOG(model=unique("history"))
    async with HistoryFollower(bus, to.name.rpartition(".")[2]) as follower:
        bus.transport.send(to.name, b"\xc1 garbage")
        await bus.transport.barrier()
        await follower.caught_up(Deadline.after(30))
        with pytest.raises(Conflict):
            await bus.logs.append(to, commit(A), expected_seq=0)
        await bus.logs.append(to, commit(A), expected_seq=follower.seq)
        await follower.wait_for(lambda history: history.head("stable") == A, Deadline.after(30))


async def test_a_log_that_was_lost_begins_anew_and_so_does_the_history(tmp_path: Path) -> None:
    to = CHANGELOG(model="m")
    async with embedded_nats(tmp_path) as server, connect(server.url, name="test") as bus:
        await bus.logs.ensure()
        await bus.logs.append(to, commit(A))
        async with HistoryFollower(bus, "m") as follower:
            await follower.caught_up(Deadline.after(30))
            lost = asyncio.Event()
            follower.on_change(lambda history: lost.set() if history.seq == 0 else None)
            await delete_stream(bus, to.subject.stream)  # type: ignore[union-attr]
            await asyncio.wait_for(lost.wait(), 30)
            await bus.logs.ensure()
            await bus.logs.append(to, commit(B))
            await follower.wait_for(lambda history: history.head("stable") == B, Deadline.after(30))
            assert list(follower.history.roots) == [B]


async def delete_stream(bus: Bus, stream: str) -> None:
    replied = asyncio.Event()
    subscription = await bus.transport.subscribe("test.deleted", lambda raw: replied.set())
    bus.transport.send(f"$JS.API.STREAM.DELETE.{stream}", b"", reply="test.deleted")
    await asyncio.wait_for(replied.wait(), 30)
    await subscription.close()
