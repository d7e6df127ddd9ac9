"""The launcher's NATS server comes back on its port, and how often it died is forgotten in time."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from pdbus.stack import nats_child
from pdbus.stack.child import Inherited
from pdbus.stack.launcher import lifeline_pipe
from pdbus.stack.nats_child import own_nats
from tests.support.until import until


@pytest.mark.parametrize(("steady_s", "counted"), [(60.0, [1, 2, 3]), (0.0, [1, 1, 1])])
async def test_each_death_in_a_row_makes_it_wait_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steady_s: float, counted: list[int]
) -> None:
    """Deaths hours apart are not in a row: else the server of a long-lived stack would be away for half a minute."""
    deaths: list[int] = []

    def backoff_s(number: int) -> float:
        deaths.append(number)
        return 0.01

    monkeypatch.setattr(nats_child, "backoff_s", backoff_s)
    monkeypatch.setattr(nats_child, "STEADY_S", steady_s)
    pids: list[int] = []
    with lifeline_pipe() as lifeline:
        async with own_nats(tmp_path, None, Inherited(lifeline, lifeline), pids.append, lambda what: None) as url:
            for number in range(3):
                await until(lambda number=number: len(pids) > number)  # type: ignore[misc]
                os.kill(pids[-1], signal.SIGKILL)
            await until(lambda: len(pids) > 3)
            host, port = url.removeprefix("nats://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
    assert deaths == counted
