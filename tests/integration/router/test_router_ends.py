"""However a request ends, by its deadline, by its client or by an error: it is told, and nothing stays held (G8)."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from pdbus.errors import Overloaded
from tests.support.completing import (
    NotBegun,
    completion,
    expected,
    promise,
    stream,
    text_of,
)
from tests.support.router_rig import Rig, rig, until


async def test_a_worker_that_was_stopped_and_goes_on_is_told_that_nobody_wants_its_tokens(
    http: aiohttp.ClientSession,
):
    """It has heard nothing meanwhile, not even the cancel: what it sends late is dropped, and makes it hear."""
    async with rig(decodes=2) as r:
        for worker in r.decodes:
            worker.behaviour.step_s = 0.02
        text, deaf = "", None
        async for chunk in stream(http, r, max_tokens=200):
            text += text_of(chunk)
            if len(text) >= 4 and deaf is None:
                deaf = next(worker for worker in r.decodes if worker.tickets)
                deaf.behaviour.deaf_cancels = 10**6
                await deaf.fall_silent()
                for other in r.decodes:
                    other.behaviour.step_s = 0.05 if other is deaf else 0.0
        assert deaf is not None
        assert text == expected(deaf)
        assert deaf.held, "it writes on"
        deaf.behaviour.step_s = 0.5  # its answer would take minutes more
        deaf.behaviour.deaf_cancels, deaf.behaviour.tamper = 0, lambda frame: (frame,)
        await until(lambda: not deaf.held)


async def test_both_workers_of_a_kind_away_for_a_while(http: aiohttp.ClientSession):
    """The request waits and tries again until its deadline."""
    async with rig() as r:
        r.decodes[0].behaviour.refuse = Overloaded("full", retry_after_s=0.1)
        asking = asyncio.create_task(promise(http, r))
        await asyncio.sleep(0.5)
        assert not asking.done()
        r.decodes[0].behaviour.refuse = None
        await asking


async def test_without_an_end_to_failures_the_deadline_is_kept(http: aiohttp.ClientSession):
    async with rig() as r:
        r.decodes[0].behaviour.refuse = Overloaded("full")
        begun = time.monotonic()
        async with http.post(r.url + "/v1/completions", json=completion(timeout=0.7)) as response:
            assert response.status == 504
        assert time.monotonic() - begun < 30
        await r.until_idle()


async def test_an_error_in_mid_stream_is_the_streams_last_event(http: aiohttp.ClientSession):
    async with rig() as r:
        r.decodes[0].behaviour.fail_at = 5
        told: list[dict[str, Any]] = []
        while not told:  # on a busy machine the deadline may come before any token
            with suppress(NotBegun):
                told = [chunk async for chunk in stream(http, r, timeout=0.7)]
        assert told[-1]["error"]["code"] == "deadline_exceeded"
        assert "".join(text_of(chunk) for chunk in told[:-1]) == expected(r.prefills[0])[: len(told) - 1]
        await r.until_idle()


@pytest.mark.parametrize("after", [0, 1, 6])
async def test_a_client_that_goes_away_frees_everything_everywhere(http: aiohttp.ClientSession, after: int):
    """LESSONS, first table, 10: also what has not begun."""
    async with rig(decodes=2) as r:
        for worker in r.workers:
            worker.behaviour.step_s = 0.05
        r.prefills[0].behaviour.mute = after == 0
        body = completion(stream=True, max_tokens=200, n=3)
        async with http.post(r.url + "/v1/completions", json=body) if after else _Hangup(http, r, body) as response:
            seen = 0
            async for line in response.content:
                seen += line.startswith(b"data")
                if seen >= after:
                    break
            _almost_stop(r)
            response.close()
        await r.until_idle()


def _almost_stop(r: Rig) -> None:
    """From now on answers would take hours: whatever is over soon was ended."""
    for worker in r.workers:
        worker.behaviour.step_s = 60.0


class _Hangup:
    """A client that goes away before it is answered."""

    def __init__(self, http: aiohttp.ClientSession, r: Rig, body: dict[str, Any]) -> None:
        self._http, self._r, self._body = http, r, body

    async def __aenter__(self) -> Any:
        asking = asyncio.create_task(self._http.post(self._r.url + "/v1/completions", json=self._body).__aenter__())
        await until(lambda: self._r.router.hub.listening_for == 3)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return _Nothing()

    async def __aexit__(self, *_: object) -> None: ...


class _Nothing:
    def __init__(self) -> None:
        self.content = self

    def __aiter__(self) -> _Nothing:
        return self

    async def __anext__(self) -> bytes:
        raise StopAsyncIteration

    def close(self) -> None: ...


async def test_a_lost_cancel_is_repeated_until_it_is_answered(http: aiohttp.ClientSession):
    async with rig() as r:
        r.decodes[0].behaviour.step_s = 0.05
        r.decodes[0].behaviour.deaf_cancels = 2
        async with http.post(r.url + "/v1/completions", json=completion(stream=True, max_tokens=400)) as response:
            await response.content.readline()
            _almost_stop(r)
            response.close()
        await r.until_idle()
