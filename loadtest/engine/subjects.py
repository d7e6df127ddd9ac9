"""The rows of the comparison: engines in processes of their own, and our whole stack over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loadtest.client import Observation, ask, session
from loadtest.engine.rounds import Running
from loadtest.machine import peak_bytes
from loadtest.peers.base import Prompts, Sources, Timing, Unusable, Weights
from loadtest.peers.remote import prepare, serving
from loadtest.prompts import completion
from loadtest.stack import Refused, Stack, stack

_ANSWER_S = 300.0


@dataclass
class ProcessSubject:
    """One engine of the catalog. Its weights are converted before its first turn."""

    name: str
    python: str
    """The interpreter that it is installed for."""
    sources: Sources
    threads: int
    _path: Path | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Running]:
        self._path = self._path or await prepare(self.python, self.name, self.sources)
        async with serving(self.python, self.name, self.sources, self._path, self.threads) as remote:
            yield remote


@dataclass(frozen=True)
class StackSubject:
    """The whole way: HTTP, router, bus, prefill and decode worker. Caches see each prompt for the first time."""

    name: str
    checkpoint: Path
    precision: str
    weights: Weights

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Running]:
        options = ("--model", str(self.checkpoint), "--precision", self.precision)
        try:
            async with stack(*options) as running, session() as http:
                yield _RunningStack(running, http, self.weights)
        except Refused as error:
            raise Unusable(f"pdbus up {' '.join(options[2:])}: {error}") from None


@dataclass
class _RunningStack:
    stack: Stack
    http: aiohttp.ClientSession
    weights: Weights

    @property
    def peak_bytes(self) -> int:
        """Of a decode worker: what stands beside an engine's own process."""
        return max((peak_bytes(pid) for pid in self.stack.pids("decode").values()), default=0)

    async def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        model, start = self.stack.model, time.perf_counter()
        bodies = [completion(model, list(prompt), new_tokens) for prompt in prompts]
        asked = (ask(self.http, self.stack.url, body, 0.0, start, _ANSWER_S) for body in bodies)
        return timing(await asyncio.gather(*asked))


def timing(answers: list[Observation]) -> Timing:
    """Of answers that were asked for at moment 0. Raises Unusable if one failed."""
    for answer in answers:
        if answer.error or not answer.chunks_s:
            raise Unusable(f"an answer failed: {answer.error or 'it has no text'}")
    last = max(answer.chunks_s[-1] for answer in answers)
    return Timing(min(answer.chunks_s[0] for answer in answers), last, answers[0].output_tokens)
