"""Runs one scenario against one server: every request leaves when it is due, whether or not earlier ones came back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from loadtest.client import Observation, ask
from loadtest.scenarios import Scenario

MOST_IN_FLIGHT = 2048
"""An open loop piles up on a server that stalls; beyond this a request is reported as not sent."""


def draw_bodies(scenario: Scenario, count: int, seed: int, model: str) -> list[dict[str, Any]]:
    rng = random.Random(f"{scenario.name}/{seed}")
    return [scenario.draw(rng, number) | {"model": model} for number in range(count)]


async def first_model(url: str, headers: Mapping[str, str] | None = None) -> str:
    """The id of the server's first model. Raises SystemExit with the reason where none can be had."""
    try:
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError, LookupError, ValueError) as error:
        raise SystemExit(f"{url} is no OpenAI-compatible server that serves a model: {error}") from None


async def run(
    url: str,
    bodies: Sequence[dict[str, Any]],
    arrivals_s: Sequence[float],
    timeout_s: float,
    progress: Callable[[int, int], None],
    headers: Mapping[str, str] | None = None,
) -> list[Observation]:
    """One observation for each body, in order of arrival. `progress(finished, all)` is called as answers end."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    finished = 0

    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        start = time.perf_counter()

        async def one(body: dict[str, Any], due_s: float) -> Observation:
            nonlocal finished
            seen = await ask(session, url, body, due_s, start, timeout_s)
            finished += 1
            progress(finished, len(bodies))
            return seen

        tasks: list[asyncio.Task[Observation]] = []
        refused: dict[int, Observation] = {}
        async with asyncio.TaskGroup() as group:
            for number, (body, due_s) in enumerate(zip(bodies, arrivals_s, strict=True)):
                await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - start)))
                if len(tasks) - finished >= MOST_IN_FLIGHT:
                    refused[number] = Observation(due_s, due_s, end_s=due_s, error="not sent: too many in flight")
                else:
                    tasks.append(group.create_task(one(body, due_s)))
    answered = iter(tasks)
    return [refused[n] if n in refused else next(answered).result() for n in range(len(bodies))]
