"""A world without a bus, for models of staging branches: logs in memory, versions as arrays, and every operation waits
until the test lets it go on. What runs in it is the real Branch and the real commit point."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from pdbus.bus.codec import decode, encode
from pdbus.bus.follower import Record
from pdbus.canonical import content_digest
from pdbus.client.weights.commit_point import append_commit
from pdbus.client.weights.terms import Committed, Terms
from pdbus.context import Deadline
from pdbus.errors import Conflict, Overloaded
from pdbus.messages.changelog import Commit, LogEntry
from pdbus.messages.updates import BranchEntry
from pdbus.subjects import BRANCH, CHANGELOG, ToEvent
from pdbus.weights.history import History
from pdbus.weights.layer import Tensor

NAME = "model.norm.weight"
ROOM = 6
"""Entries that a branch may hold."""
S = 1_000_000_000


class Gate:
    """Tasks stop at it, each at every operation, and go on one at a time as the test says."""

    def __init__(self) -> None:
        self.waiting: list[tuple[asyncio.Task[Any], asyncio.Future[None]]] = []
        self.open = False

    async def __call__(self) -> None:
        if not self.open:
            task, future = asyncio.current_task(), asyncio.get_running_loop().create_future()
            assert task
            self.waiting.append((task, future))
            await future


class MemoryLogs:
    """As JetStream keeps them: one sequence for each stream, compare-and-set by subject, message ids, a bound."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.entries: dict[str, list[tuple[int, bytes]]] = {}
        self.seqs: dict[str, int] = {}
        self.taken: dict[int, BranchEntry] = {}
        """Every entry that a branch has ever taken."""
        self.lose_answers = 0
        """Of so many appends from now on the caller hears nothing but a failed compare."""
        self._ids: dict[str, int] = {}

    async def append(self, to: ToEvent[Any], entry: Any, *, expected_seq: int | None = None,
                     message_id: str | None = None, deadline: Deadline | None = None) -> int:  # fmt: skip
        await self.gate()
        kept = self.entries.setdefault(to.name, [])
        if message_id in self._ids:
            return self._ids[message_id or ""]
        if expected_seq is not None and expected_seq != (kept[-1][0] if kept else 0):
            raise Conflict("wrong last sequence")
        if to.subject is BRANCH and len(kept) >= ROOM:
            raise Overloaded("no room")
        seq = self.seqs[to.name] = self.seqs.get(to.name, 0) + 1
        kept.append((seq, encode(entry)))
        if isinstance(entry, BranchEntry):
            self.taken[seq] = entry
        if message_id:
            self._ids[message_id] = seq
        await self.gate()
        if self.lose_answers and to.subject is CHANGELOG:
            self.lose_answers -= 1
            raise Conflict("the answer was lost")
        return seq

    async def between(self, to: ToEvent[Any], after: int, upto: int) -> AsyncIterator[Record[Any]]:
        while True:
            await self.gate()
            found = next((it for it in self.entries.get(to.name, []) if after < it[0] <= upto), None)
            if not found:
                return
            after = found[0]
            yield Record(after, after * S, decode(to.subject.message, found[1]))  # type: ignore[union-attr]

    async def last_seq(self, to: ToEvent[Any]) -> int:
        await self.gate()
        kept = self.entries.get(to.name)
        return kept[-1][0] if kept else 0

    async def state(self, to: ToEvent[Any]) -> Any:
        await self.gate()
        return SimpleNamespace(created="born")

    async def purge(self, to: ToEvent[Any], *, upto: int | None = None) -> None:
        await self.gate()
        self.entries[to.name] = [it for it in self.entries.get(to.name, []) if upto is not None and it[0] > upto]

    def read(self, to: ToEvent[Any]) -> list[tuple[int, Any]]:
        return [(seq, decode(to.subject.message, data)) for seq, data in self.entries.get(to.name, [])]  # type: ignore[union-attr]


class World:
    def __init__(self, size: int) -> None:
        self.gate = Gate()
        self.logs = MemoryLogs(self.gate)
        self.bus: Any = SimpleNamespace(logs=self.logs)
        self.arrays: dict[bytes, np.ndarray] = {}
        self.log, self.branch = CHANGELOG(model="m"), BRANCH(model="m", branch="b")
        first = self.put(np.zeros(size, np.float32))
        entry = LogEntry(commit=Commit("first", first, None, "me", "", ()))
        self.logs.entries[self.log.name], self.logs.seqs[self.log.name] = [(1, encode(entry))], 1

    def put(self, array: np.ndarray) -> bytes:
        root = content_digest(array.tobytes())
        self.arrays[root] = array
        return root

    def history(self) -> History:
        history = History()
        for seq, entry in self.logs.read(self.log):
            history.apply(seq, seq * S, entry)
        return history

    def pushed(self) -> list[tuple[int, BranchEntry]]:
        return self.logs.read(self.branch)


class Life:
    """One process: stands for a Weights and its follower."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._history = world.history()

    async def history(self) -> History:
        await self.world.gate()
        self._history = self.world.history()
        return self._history

    async def manifest(self, root: bytes) -> Any:
        array = self.world.arrays[root]
        return SimpleNamespace(tensor=lambda name: Tensor(name, "fp32", array.shape, (root,)))

    async def update(self, terms: Terms, deadline: Deadline) -> Any:
        await self.world.gate()
        return WorldUpdate(self.world, terms, deadline)


@dataclass
class WorldFollower:
    """As a HistoryFollower: knows the log up to its last look."""

    world: World
    history: History

    @property
    def seq(self) -> int:
        return self.history.seq

    async def caught_up(self, deadline: Deadline) -> None:
        self.history = self.world.history()
        await self.world.gate()


class WorldUpdate:
    """As an Update, whose blocks are at their owners at once."""

    def __init__(self, world: World, terms: Terms, deadline: Deadline) -> None:
        self._world, self._terms, self._deadline = world, terms, deadline
        self._follower = WorldFollower(world, world.history())

    async def __aenter__(self) -> WorldUpdate:
        head = self._follower.history.head(self._terms.ref)
        assert head
        self.parent, self._array = head, self._world.arrays[head]
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    def tensor(self, name: str) -> Tensor:
        return Tensor(name, "fp32", self._array.shape, (self.parent,))

    async def block_arrays(self, name: str, indices: Sequence[int]) -> dict[int, np.ndarray]:
        await self._world.gate()
        return {index: self._array.copy() for index in indices}

    async def stage_blocks(self, name: str, blocks: Mapping[int, np.ndarray]) -> int:
        await self._world.gate()
        self._array = blocks.get(0, self._array)
        return len(blocks)

    async def commit(self) -> Committed:
        root, terms = self._world.put(self._array), self._terms
        commit = Commit(terms.tx, root, self.parent, terms.author, "", (), ref=terms.ref, sealed=terms.sealed)
        seq = await append_commit(self._world.bus, "m", self._follower, commit, self._deadline)  # type: ignore[arg-type]
        return Committed(root, seq, 1, 0)
