"""The rows of the comparison: engines in processes of their own, and our whole stack over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loadtest.asking import Failed, at_once
from loadtest.client import Observation, session
from loadtest.engine.rounds import Running
from loadtest.memory import peak_bytes
from loadtest.peers.base import Prompts, Sources, Timing, Unusable, Weights
from loadtest.peers.remote import prepare, serving
from loadtest.stack import APART, Refused, Stack, stack
from pdbus.model.backends import BackendOptions


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
    """The whole way: HTTP, router, bus and workers. Caches see each prompt for the first time."""

    name: str
    checkpoint: Path
    options: BackendOptions
    weights: Weights
    colocated: bool = False
    """One worker reads and writes; else two, which share the cores."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Running]:
        asked = ["--precision", self.options.precision, "--kv-dtype", self.options.kv_dtype]
        asked += ["--colocated"] if self.colocated else APART
        env = {"PDBUS_ENGINE": self.options.engine}
        try:
            async with stack("--model", str(self.checkpoint), *asked, env=env) as running, session() as http:
                yield _RunningStack(running, http, self.weights)
        except Refused as error:
            raise Unusable(f"pdbus up {' '.join(asked)}: {error}") from None


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
        try:
            return timing(await at_once(self.http, self.stack, prompts, new_tokens))
        except Failed as error:
            raise Unusable(str(error)) from None


def timing(answers: Sequence[Observation]) -> Timing:
    """Of answers that were asked for at moment 0; at least one, and none without text."""
    last = max(answer.chunks_s[-1] for answer in answers)
    return Timing(min(answer.chunks_s[0] for answer in answers), last, answers[0].output_tokens)
