"""Who hears a request to stop, and when."""

from __future__ import annotations

import asyncio

import pytest

from pdbus.runtime.stop import Stop


async def test_a_stop_interrupts_a_start() -> None:
    stops: list[Stop] = []

    async def life() -> None:
        stops.append(Stop())
        await asyncio.Event().wait()

    task = asyncio.create_task(life())
    await asyncio.sleep(0)
    stops[0].request("SIGTERM")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stops[0].requested.is_set()


async def test_once_up_it_is_only_told_and_a_second_one_hurries() -> None:
    stop = Stop()
    stop.starting = False
    stop.request("SIGTERM")
    await asyncio.sleep(0)
    assert stop.requested.is_set()
    assert not stop.hurry.is_set()
    stop.request("SIGTERM")
    assert stop.hurry.is_set()


async def test_a_lost_launcher_hurries_at_once_from_another_thread() -> None:
    stop = Stop()
    stop.starting = False
    await asyncio.to_thread(stop.launcher_lost)
    async with asyncio.timeout(30):
        await stop.requested.wait()
    assert stop.hurry.is_set()
