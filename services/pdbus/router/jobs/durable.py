"""What jobs need of JetStream (bus/logs.py)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol, TypeVar

from pdbus.backoff import backoff_s
from pdbus.bus.follower import Record
from pdbus.context import new_id
from pdbus.errors import Overloaded, Unavailable
from pdbus.subjects import Log, ToEvent

Q = TypeVar("Q")
R = TypeVar("R")
M_co = TypeVar("M_co", covariant=True)
_READS_AT_ONCE = 16


class Taken(Protocol[M_co]):
    """A message of a queue, until it is settled."""

    @property
    def message(self) -> M_co: ...

    @property
    def deliveries(self) -> int: ...

    async def done(self) -> None: ...


class Durable(Protocol):
    async def append(
        self,
        to: ToEvent[Q],
        entry: Q,
        *,
        expected_seq: int | None = None,
        message_id: str | None = None,
        replaces: bool = False,
        reserves: int = 0,
    ) -> int: ...

    async def last(self, to: ToEvent[Q]) -> Record[Q] | None: ...

    async def next(self, to: ToEvent[Q], after: int) -> Record[Q] | None: ...

    async def counts(self, to: ToEvent[Q]) -> dict[str, int]: ...

    async def enqueue(self, to: ToEvent[Q], message: Q, *, message_id: str | None = None) -> int: ...

    def work(self, to: ToEvent[Q]) -> AsyncGenerator[Taken[Q], None]: ...


class Patient:
    """The same, for who works on what was accepted: however long JetStream is away, or has no room. To give the work
    back would only count as another death, and have all of it done again."""

    def __init__(self, logs: Durable) -> None:
        self._logs = logs
        self.counts, self.enqueue, self.work = logs.counts, logs.enqueue, logs.work
        self._rng = random.Random()  # noqa: S311 - spreads retries

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
        id_ = message_id or new_id()  # one for all tries: the log knows what it has
        return await self._answered(
            lambda: self._logs.append(
                to, entry, expected_seq=expected_seq, message_id=id_, replaces=replaces, reserves=reserves
            )
        )

    async def last(self, to: ToEvent[Q]) -> Record[Q] | None:
        return await self._answered(lambda: self._logs.last(to))

    async def next(self, to: ToEvent[Q], after: int) -> Record[Q] | None:
        return await self._answered(lambda: self._logs.next(to, after))

    async def _answered(self, ask: Callable[[], Awaitable[R]]) -> R:
        retries = 0
        while True:
            try:
                return await ask()
            except (Unavailable, Overloaded):
                retries += 1
                await asyncio.sleep(backoff_s(retries, self._rng))


async def last_of_each(logs: Durable, to: ToEvent[Q]) -> list[tuple[str, Record[Q]]]:
    """Of each subject that `to` stands for, its name and last entry."""
    assert isinstance(to.subject, Log)
    found: list[tuple[str, Record[Q]]] = []
    one_of = [ToEvent(to.subject, name) for name in await logs.counts(to)]
    for start in range(0, len(one_of), _READS_AT_ONCE):
        some = one_of[start : start + _READS_AT_ONCE]
        for one, last in zip(some, await asyncio.gather(*map(logs.last, some)), strict=True):
            if last is not None:
                found.append((one.name, last))
    return found
