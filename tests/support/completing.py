"""Asking a router for completions, what they have to be, and faults of the frames that they come in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp

from loadtest.simulated import SimulatedWorker
from loadtest.simulated_answers import letters
from pdbus.messages.router import TokenFrame
from tests.support.router_rig import MODEL, Rig

LENGTH = 24


class NotBegun(Exception):
    """The answer ended before its first token. (status, body)"""


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "a prompt of more than one page", "max_tokens": LENGTH, "temperature": 0} | fields


async def complete(http: aiohttp.ClientSession, r: Rig, **fields: Any) -> dict[str, Any]:
    headers = {"Cache-Control": "no-store"}
    async with http.post(r.url + "/v1/completions", json=completion(**fields), headers=headers) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def stream(http: aiohttp.ClientSession, r: Rig, **fields: Any) -> AsyncIterator[dict[str, Any]]:
    body = completion(stream=True, **fields)
    async with http.post(r.url + "/v1/completions", json=body, headers={"Cache-Control": "no-store"}) as response:
        if response.status != 200:
            raise NotBegun(response.status, await response.text())
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def expected(worker: SimulatedWorker) -> str:
    """What an undisturbed worker answers to the first ticket."""
    return bytes(letters(replace(worker.tickets[0], delivered=()))).decode()


async def promise(http: aiohttp.ClientSession, r: Rig, **fields: Any) -> dict[str, Any]:
    answer = await complete(http, r, **fields)
    assert text_of(answer) == expected(next(worker for worker in r.workers if worker.tickets))
    await r.until_idle()
    return answer


def _numbered(change: Callable[[int, TokenFrame], list[TokenFrame]]) -> Callable[[TokenFrame], list[TokenFrame]]:
    count = iter(range(10**9))
    return lambda frame: change(next(count), frame)


def _swapping() -> Callable[[TokenFrame], list[TokenFrame]]:
    """Every two frames in the wrong order; the last one waits for nobody."""
    held: list[TokenFrame] = []

    def swap(frame: TokenFrame) -> list[TokenFrame]:
        if frame.items[0].finish or held:
            out = [frame, *held]
            held.clear()
            return out
        held.append(frame)
        return []

    return swap


def with_items(frame: TokenFrame, **changed: Any) -> TokenFrame:
    return replace(frame, items=tuple(replace(item, **changed) for item in frame.items))


LIES = {"ids": (ord("!"),), "finish": None}

FRAME_FAULTS: dict[str, Callable[[], Callable[[TokenFrame], list[TokenFrame]]]] = {
    "first lost": lambda: _numbered(lambda n, frame: [] if n == 0 else [frame]),
    "third lost": lambda: _numbered(lambda n, frame: [] if n == 2 else [frame]),
    "every second lost": lambda: _numbered(lambda n, frame: [] if n % 2 else [frame]),
    "all repeated": lambda: _numbered(lambda n, frame: [frame, frame, frame]),
    "swapped": _swapping,
    "foreign root beside": lambda: _numbered(lambda n, frame: [with_items(frame, root=b"x" * 32, **LIES), frame]),
    "old attempt beside": lambda: _numbered(lambda n, frame: [with_items(frame, attempt=0, **LIES), frame]),
    "later attempt beside": lambda: _numbered(lambda n, frame: [with_items(frame, attempt=9, **LIES), frame]),
    "repeated at the end": lambda: _numbered(
        lambda n, frame: [frame, with_items(frame, index=0, **LIES)] if n else [frame]
    ),
}
