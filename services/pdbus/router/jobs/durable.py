"""What jobs need of JetStream (bus/logs.py)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol, TypeVar

from pdbus.bus.follower import Record
from pdbus.subjects import ToEvent

Q = TypeVar("Q")
M_co = TypeVar("M_co", covariant=True)


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
    ) -> int: ...

    async def last(self, to: ToEvent[Q]) -> Record[Q] | None: ...

    async def next(self, to: ToEvent[Q], after: int) -> Record[Q] | None: ...

    async def counts(self, to: ToEvent[Q]) -> dict[str, int]: ...

    async def enqueue(self, to: ToEvent[Q], message: Q, *, message_id: str | None = None) -> int: ...

    def work(self, to: ToEvent[Q]) -> AsyncGenerator[Taken[Q], None]: ...
