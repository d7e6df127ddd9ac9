"""Checkpoints of the change log on a real bus: written once, by one server; late joiners begin with the newest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from pdbus.bus.bus import Bus, connect
from pdbus.client.weights.lineage import find_lineage, lineage_of
from pdbus.context import Deadline
from pdbus.messages.changelog import Abort, Commit, Forget, LogEntry, Ref
from pdbus.param_server.checkpoints import Checkpointer
from pdbus.peers.history import HistoryFollower
from pdbus.stack import weights_log
from pdbus.stack.attach import Target
from pdbus.subjects import CHANGELOG, CHECKPOINTS
from pdbus.weights import checkpointing
from pdbus.weights.checkpointing import checkpoint_of

A, B, C = (bytes([byte]) * 32 for byte in (0xAA, 0xBB, 0xCC))


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with connect(nats_url, name="test") as bus:
        await bus.logs.ensure()
        yield bus


def commit(root: bytes, parent: bytes | None) -> LogEntry:
    return LogEntry(commit=Commit(root.hex(), root, parent, "ann", "m", (("head", root),)))


async def test_a_late_joiner_begins_with_the_newest_checkpoint(
    bus: Bus, nats_url: str, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "EVERY", 5)
    monkeypatch.setattr("pdbus.param_server.checkpoints.EVERY", 5)
    model = unique("checkpoints")
    to, kept = CHANGELOG(model=model), CHECKPOINTS(model=model)
    async with HistoryFollower(bus, model) as full, HistoryFollower(bus, model) as other:
        servers = [Checkpointer(bus, model, follower) for follower in (full, other)]

        async def goes_on(*entries: LogEntry) -> None:
            for entry in entries:
                await bus.logs.append(to, entry)
                for follower in (full, other):
                    await follower.caught_up(Deadline.after(30))
                await asyncio.gather(*(server.look() for server in servers))

        await goes_on(commit(A, None), LogEntry(ref=Ref("stable", A, "ann")), commit(B, A))
        assert await bus.logs.last(kept) is None
        await goes_on(LogEntry(ref=Ref("canary", B, "ann", share=0.2)), LogEntry(abort=Abort("t", "late")))
        first = await bus.logs.last(kept)
        assert first
        assert first.entry == checkpoint_of(full.history, full.born)
        await goes_on(LogEntry(ref=Ref("stable", B, "ann")), LogEntry(forget=Forget((A,), "bob")), commit(C, B))
        async with connect(nats_url, name="late") as late_bus, HistoryFollower(late_bus, model) as late:
            await late.caught_up(Deadline.after(30))
            assert (late.seq, late.history.entries) == (full.seq, 8)
            assert checkpoint_of(late.history, late.born) == checkpoint_of(full.history, full.born)
            await goes_on(*(LogEntry(abort=Abort(f"t{number}", "late")) for number in range(8)))
            await late.caught_up(Deadline.after(30))
            assert checkpoint_of(late.history, late.born) == checkpoint_of(full.history, full.born)
        assert (await bus.logs.counts(kept))[kept.name] == 2
        newest = await bus.logs.last(kept)
        assert newest
        assert newest.entry.entries == 15
        found, left_out = await weights_log.entries(Target(nats_url, model), whole=False)
        assert len(found) == 16 - 10
        assert found[0][0] > left_out

        told = await lineage_of(bus.logs, to, full.history.roots[C], full.history)
        assert (told.commit.author, told.commit.parent, told.waiting, told.kept) == ("ann", B, ("stable",), True)
        served = await lineage_of(bus.logs, to, full.history.roots[B], full.history)
        assert set(served.refs) == {"stable", "canary"}
        gone = await find_lineage(bus.logs, to, A.hex()[:12], full.seq)
        assert (gone.commit.message, gone.given_up_by, gone.kept) == ("m", "bob", False)


async def test_a_checkpoint_of_a_log_that_was_lost_is_not_used(bus: Bus, unique: Callable[[str], str]) -> None:
    model = unique("checkpoints")
    async with HistoryFollower(bus, model) as follower:
        await bus.logs.append(CHANGELOG(model=model), commit(A, None))
        await follower.caught_up(Deadline.after(30))
        stale = checkpoint_of(follower.history, "the day before yesterday")
    await bus.logs.append(CHECKPOINTS(model=model), stale)
    await bus.logs.append(CHANGELOG(model=model), commit(B, A))
    async with HistoryFollower(bus, model) as follower:
        await follower.caught_up(Deadline.after(30))
        assert list(follower.history.roots) == [A, B]
        assert follower.history.entries == 2
