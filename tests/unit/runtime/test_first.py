"""Whichever comes first, and nothing of the rest is left."""

from __future__ import annotations

import asyncio

import pytest

from pdbus.runtime.first import first


async def test_the_rest_is_cancelled_and_awaited() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("slow")

    assert await first(slow(), asyncio.sleep(0)) is True
    assert ended == ["slow"]


async def test_nothing_in_time_is_told_apart() -> None:
    assert await first(asyncio.Event().wait(), within_s=0.01) is False


async def test_what_the_first_one_raised_is_raised() -> None:
    async def fails() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await first(fails(), asyncio.Event().wait())


async def test_a_cancel_from_outside_ends_all() -> None:
    ended = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(first(slow()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
