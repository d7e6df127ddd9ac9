"""Logs and work queues in memory, as far as jobs need them, that crash their user at any step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pdbus.bus.follower import Record
from pdbus.errors import Conflict, Unavailable
from pdbus.subjects import ToEvent

Q = TypeVar("Q")


class Crash(BaseException):
    """The process ends here."""


@dataclass
class Waiting:
    message: Any
    deliveries: int = 0


class Message(Generic[Q]):
    def __init__(self, logs: MemoryLogs, queue: str, waiting: Waiting) -> None:
        self._logs, self._queue, self._waiting = logs, queue, waiting
        waiting.deliveries += 1
        self.message: Q = waiting.message
        self.deliveries = waiting.deliveries

    async def done(self) -> None:
        self._logs.step("before")
        if self._waiting in self._logs.queues[self._queue]:
            self._logs.queues[self._queue].remove(self._waiting)
        self._logs.step("after")


@dataclass
class MemoryLogs:
    """`crash`: at the how-manyth operation from now on, and whether before or after its effect."""

    entries: dict[str, list[Record[Any]]] = field(default_factory=dict)
    queues: dict[str, list[Waiting]] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    appended: dict[str, int] = field(default_factory=dict)
    """By message id."""
    seq: int = 0
    crash: tuple[int, Literal["before", "after"]] | None = None
    faults: int = 0
    """So many of the next operations on logs fail: JetStream is away."""
    lost_answers: int = 0
    """So many of the next appends are stored, and nobody is told."""
    refuses: BaseException | None = None
    """What the next append raises, nothing being stored."""
    calls: int = 0
    _steps: int = 0

    def crash_at(self, step: int, when: Literal["before", "after"]) -> None:
        self._steps, self.crash = 0, (step, when)

    def step(self, when: Literal["before", "after"]) -> None:
        self.calls += when == "before"
        if self.crash is None:
            return
        self._steps += when == "before"
        if (self._steps, when) == self.crash:
            self.crash = None
            raise Crash

    def fault(self) -> None:
        if self.faults:
            self.faults -= 1
            raise Unavailable("away")

    async def append(
        self,
        to: ToEvent[Q],
        entry: Q,
        *,
        expected_seq: int | None = None,
        message_id: str | None = None,
        replaces: bool = False,
        reserves: int = 0,
    ) -> int:
        await asyncio.sleep(0)
        self.fault()
        self.step("before")
        if refused := self.refuses:
            self.refuses = None
            raise refused
        kept = self.entries.setdefault(to.name, [])
        if message_id is not None and message_id in self.appended:
            return self.appended[message_id]
        if expected_seq is not None and expected_seq != (kept[-1].seq if kept else 0):
            raise Conflict("wrong last sequence")
        self.seq += 1
        if replaces:
            kept.clear()
        kept.append(Record(self.seq, 0, entry))
        if message_id is not None:
            self.appended[message_id] = self.seq
        self.step("after")
        if self.lost_answers:
            self.lost_answers -= 1
            raise Unavailable("no answer")
        return self.seq

    async def last(self, to: ToEvent[Q]) -> Record[Q] | None:
        await asyncio.sleep(0)
        self.fault()
        self.step("before")
        return (self.entries.get(to.name) or [None])[-1]

    async def next(self, to: ToEvent[Q], after: int) -> Record[Q] | None:
        await asyncio.sleep(0)
        self.fault()
        self.step("before")
        return next((record for record in self.entries.get(to.name, ()) if record.seq > after), None)

    async def counts(self, to: ToEvent[Q]) -> dict[str, int]:
        start = to.name.removesuffix("*")
        return {name: len(kept) for name, kept in self.entries.items() if name.startswith(start)}

    async def enqueue(self, to: ToEvent[Q], message: Q, *, message_id: str | None = None) -> int:
        await asyncio.sleep(0)
        self.step("before")
        if message_id is None or message_id not in self.ids:
            self.queues.setdefault(to.name, []).append(Waiting(message))
            self.ids |= {message_id} - {None}  # type: ignore[assignment]
        self.step("after")
        return 1

    def take(self, to: ToEvent[Q], at: int = 0) -> Message[Q] | None:
        """One that waits, given out once more."""
        waiting = self.queues.get(to.name) or []
        return Message(self, to.name, waiting[at % len(waiting)]) if waiting else None

    def work(self, to: ToEvent[Q]) -> AsyncGenerator[Message[Q], None]:
        raise TypeError("messages are taken by `take`")
