"""Values on their way hold up nobody else's."""

from __future__ import annotations

import pytest

from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.cache import transfers
from pdbus.cache.transfers import Transfers
from pdbus.context import Deadline
from tests.support.until import until


async def test_values_that_nobody_begins_to_send_make_room_long_before_their_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer that told their writers of the streams was lost."""
    monkeypatch.setattr(transfers, "_BEGINS_S", 0.05)

    async def keep(body: bytes) -> None:
        raise AssertionError("nothing was sent")

    async with memory_bus(MemoryBroker()) as bus:
        taking = Transfers(bus, 1 << 20)
        for _ in range(2 * transfers._AT_ONCE):
            assert await taking.take(1024, keep, Deadline.after(3600))
        await until(lambda: not len(taking))
        await taking.close()
