"""Tasks end with their owner, and what one failed with is heard of."""

from __future__ import annotations

import asyncio

import pytest

from pdbus.tasks import cancelled


async def test_it_returns_once_every_task_has_given_back_what_it_held() -> None:
    held = {1, 2}

    async def hold(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            held.discard(number)

    tasks = [asyncio.create_task(hold(number)) for number in sorted(held)]
    await asyncio.sleep(0)
    await cancelled(None, *tasks)
    assert not held
    assert all(task.cancelled() for task in tasks)


async def test_a_task_that_had_failed_is_logged_and_does_not_keep_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("a fault of its own")

    failed, waiting = asyncio.create_task(fail()), asyncio.create_task(asyncio.Event().wait())
    await asyncio.wait([failed])
    await cancelled(failed, waiting)
    assert waiting.cancelled()
    assert "a fault of its own" in caplog.text


async def test_nothing_to_end_is_fine() -> None:
    await cancelled()
    await cancelled(None)
