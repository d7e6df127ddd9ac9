"""Who wants a version in int8 that servers are making waits for it: as long as that makes sense."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.messages.changelog import Commit, Convert, LogEntry, Ref
from pdbus.peers import weights as subject
from pdbus.peers.history import HistoryFollower
from pdbus.peers.weights import BlockReader

A, B, C, A8, B8 = (letter * 32 for letter in (b"A", b"B", b"C", b"a", b"b"))
_NS = 1_000_000_000


class Log(HistoryFollower):
    """Whose entries a test brings."""

    async def put(self, *entries: LogEntry) -> None:
        for entry in entries:
            self.history.apply(self.history.seq + 1, self._now_ns + self.history.seq * _NS, entry)
            self._tell()
        await asyncio.sleep(0)

    _now_ns = 2_000_000_000 * _NS
    """Later than any wall clock, so that nothing is too old."""


def commit(root: bytes, parent: bytes | None) -> LogEntry:
    return LogEntry(commit=Commit(root.hex(), root, parent, "me", "", ()))


def made(root: bytes, source: bytes, parent: bytes | None) -> LogEntry:
    entry = commit(root, parent).commit
    assert entry
    return LogEntry(commit=replace(entry, ref="stable-int8", precision="int8", source=source))


def moved(name: str, root: bytes) -> LogEntry:
    return LogEntry(ref=Ref(name, root, "me"))


FOLLOWED = LogEntry(convert=Convert("int8", "stable-int8", "me", line="stable"))


@pytest.fixture
async def log() -> Log:
    """A line that is followed, whose new head is not made in int8 yet."""
    async with memory_bus(MemoryBroker()) as bus:
        log = Log(bus, "m")
    first = (commit(A, None), moved("stable", A), FOLLOWED, made(A8, A, None), moved("stable-int8", A8))
    await log.put(*first, commit(B, A))
    return log


@pytest.fixture
async def reader(log: Log) -> BlockReader:
    async with memory_bus(MemoryBroker()) as bus:
        return BlockReader(bus, "m", log)


async def begun(reader: BlockReader, root: bytes = B) -> asyncio.Task[tuple[bytes, bytes] | None]:
    waiting = asyncio.create_task(reader.awaited_int8(root, 0))
    for _ in range(5):
        await asyncio.sleep(0)
    return waiting


async def test_it_is_waited_for_until_it_is_made(log: Log, reader: BlockReader) -> None:
    waiting = await begun(reader)
    await log.put(LogEntry(commit=Commit("other", C, None, "me", "", (), ref="side")))
    assert not waiting.done()
    await log.put(made(B8, B, A8))
    assert await asyncio.wait_for(waiting, 5) == (B, B8)
    assert await reader.awaited_int8(B8, 0) == (B, B8)


async def test_a_head_that_another_one_follows_is_not_waited_for(log: Log, reader: BlockReader) -> None:
    waiting = await begun(reader)
    await log.put(commit(C, B))
    assert await asyncio.wait_for(waiting, 5) is None


async def test_nor_one_that_nobody_is_to_make(log: Log, reader: BlockReader) -> None:
    waiting = await begun(reader)
    await log.put(LogEntry(ref=Ref("stable-int8", None, "me")))
    assert await asyncio.wait_for(waiting, 5) is None
    assert await asyncio.wait_for(reader.awaited_int8(B, 0), 5) is None


async def test_the_wait_ends_where_it_is_not_made(reader: BlockReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_MAKING_S", 0.0)
    assert await asyncio.wait_for(reader.awaited_int8(B, 1), 5) is None
