from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdbus.client.weights.row_writer import RowWriter
from pdbus.context import Deadline
from pdbus.errors import PdbusError, Unavailable
from pdbus.messages.rows import RowsUpdate
from pdbus.subjects import ROWS
from pdbus.weights.tables import decoded_update
from tests.support.until import until

ROWS_OF_ALL = 100


@dataclass
class FakeLog:
    """Takes entries when the test lets it; what it takes it takes once per message id, as JetStream does."""

    entries: list[dict[int, float]] = field(default_factory=list)
    failures: dict[int, list[PdbusError | None]] = field(default_factory=dict)
    """By message, in the order in which they first came: what its tries end with."""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    ids: dict[str, int] = field(default_factory=dict)

    async def append(self, to: Any, entry: RowsUpdate, *, message_id: str, deadline: Deadline) -> int:
        number = self.ids.setdefault(message_id, len(self.ids))
        await self.open.wait()
        outcome = self.failures.get(number, [])
        if outcome and (error := outcome.pop(0)):
            raise error
        ids, values = decoded_update(entry, ROWS_OF_ALL, 1)
        self.entries.append(dict(zip(ids.tolist(), values[:, 0].tolist(), strict=True)))
        return len(self.entries)

    def newest(self) -> dict[int, float]:
        return {row: value for entry in self.entries for row, value in entry.items()}


def writer(log: FakeLog, most_rows: int = 4) -> RowWriter:
    bus: Any = SimpleNamespace(logs=log)
    return RowWriter(bus, ROWS(model="m", table="t"), 1, most_rows)


def row(value: float) -> np.ndarray:
    return np.array([[value]], np.float32)


async def test_updates_become_few_messages_that_hold_the_last_value_of_each_row() -> None:
    log = FakeLog()
    log.open.set()
    rows = writer(log)
    accepted = [await rows.add(np.array([i % 3]), row(i)) for i in range(4)]
    assert await rows.flush(Deadline.after(30)) == 1
    assert log.entries == [{0: 3.0, 1: 1.0, 2: 2.0}]
    assert [await one for one in accepted] == [1, 1, 1, 1]
    many = await rows.add(np.arange(10), np.arange(10, dtype=np.float32).reshape(10, 1))
    assert await many == 4  # of three messages the last
    assert [len(entry) for entry in log.entries[1:]] == [4, 4, 2]


async def test_who_updates_faster_than_the_log_takes_waits() -> None:
    log = FakeLog()
    rows = writer(log)

    async def add() -> None:
        for i in range(10_000):
            await rows.add(np.array([i % 50]), row(i))

    adding = asyncio.create_task(add())
    await until(lambda: len(log.ids) == 16)  # in flight, of four rows each
    for _ in range(50):  # and no more
        await asyncio.sleep(0)
    assert not adding.done()
    assert len(log.ids) == 16
    log.open.set()
    await adding
    await rows.flush(Deadline.after(30))
    assert log.newest() == {i % 50: float(i) for i in range(9_950, 10_000)}
    await rows.close(Deadline.after(30))


async def test_a_message_that_had_to_be_repeated_does_not_bring_back_older_values() -> None:
    log = FakeLog(failures={0: [Unavailable("a leader is being elected"), Unavailable("still")]})
    rows = writer(log)
    first = await rows.add(np.array([1, 2, 3, 4]), np.array([[10], [20], [30], [40]], np.float32))
    second = await rows.add(np.array([2, 3, 5, 6]), np.array([[21], [31], [51], [61]], np.float32))
    log.open.set()
    assert (await second, await first) == (1, 2)
    assert log.entries == [{2: 21.0, 3: 31.0, 5: 51.0, 6: 61.0}, {1: 10.0, 4: 40.0}]


async def test_what_can_not_be_appended_is_told_and_the_rest_goes_on() -> None:
    log = FakeLog(failures={0: [PdbusError("refused")]})
    log.open.set()
    rows = writer(log)
    lost = await rows.add(np.arange(4), np.zeros((4, 1), np.float32))
    kept = await rows.add(np.arange(4), np.ones((4, 1), np.float32))
    with pytest.raises(PdbusError, match="refused"):
        await lost
    assert await kept == 1
    with pytest.raises(PdbusError, match="refused"):
        await rows.flush(Deadline.after(30))
    assert await rows.flush(Deadline.after(30)) == 1


async def test_one_who_stops_waiting_stops_nobody_else() -> None:
    log = FakeLog()
    rows = writer(log)
    one, other = await rows.add(np.array([1]), row(1)), await rows.add(np.array([2]), row(2))

    async def wait() -> int:
        return await one

    impatient = asyncio.create_task(wait())
    await asyncio.sleep(0)
    impatient.cancel()
    log.open.set()
    assert await other == 1
