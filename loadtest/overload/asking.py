"""Requests with a deadline and a key, closed loop or open, and what came of each."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from loadtest.arrivals import poisson
from loadtest.client import Observation, ask
from loadtest.prompts import Prompts, completion
from loadtest.stack import Stack

_DRAWN_TOKENS = 4096
_PATIENCE_S = 30.0
"""Beyond the deadline: then it is the server that broke its word."""
REFUSED = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a request."""

    prompt_tokens: int
    new_tokens: int
    deadline_s: float = 120.0


class Asker:
    """One tenant. Prompts share no page."""

    def __init__(self, stack: Stack, prompts: Prompts, shape: Shape, key: str = "", seed: int = 0) -> None:
        self.shape = shape
        self._url, self._model = stack.url, stack.model
        self._key = key
        self._rng = random.Random(seed)
        self._ids = prompts.draw("overload", _DRAWN_TOKENS)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        headers = {"Cache-Control": "no-store", "X-Request-Timeout-Ms": str(int(self.shape.deadline_s * 1e3))}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
            yield session

    async def closed(self, streams: int, duration_s: float, *, spread_s: float = 0.0) -> list[Observation]:
        """So many at any time, begun one after another within `spread_s`; one that is refused asks again after a
        moment."""
        start, seen = time.perf_counter(), list[Observation]()

        async def stream(session: aiohttp.ClientSession, number: int) -> None:
            await asyncio.sleep(spread_s * number / streams)
            while (now := time.perf_counter() - start) < duration_s:
                seen.append(await self._one(session, now, start))
                await asyncio.sleep(0.25 if seen[-1].status in REFUSED else 0)

        async with self._session() as session:
            await asyncio.gather(*(stream(session, number) for number in range(streams)))
        return seen

    async def open(self, rate: float, duration_s: float, seed: int = 1) -> list[Observation]:
        """Arrivals that wait for nobody; who is refused does not come back."""
        start = time.perf_counter()
        async with self._session() as session:

            async def one(due_s: float) -> Observation:
                await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - start)))
                return await self._one(session, due_s, start)

            return list(await asyncio.gather(*(one(due_s) for due_s in poisson(rate, duration_s, seed))))

    async def at(self, moments_s: Sequence[float]) -> list[Observation]:
        """One at each of these moments from now."""
        start = time.perf_counter()
        async with self._session() as session:

            async def one(due_s: float) -> Observation:
                await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - start)))
                return await self._one(session, due_s, start)

            return list(await asyncio.gather(*map(one, moments_s)))

    async def _one(self, session: aiohttp.ClientSession, due_s: float, start: float) -> Observation:
        prompt = self._rng.choices(self._ids, k=self.shape.prompt_tokens)
        body = completion(self._model, prompt, self.shape.new_tokens)
        return await ask(session, self._url, body, due_s, start, self.shape.deadline_s + _PATIENCE_S)
