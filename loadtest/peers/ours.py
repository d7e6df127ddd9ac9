"""Our own engine in process: scheduler, step loop and sampler as the workers run them, without bus and router."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.peers.base import Clock, Prompts, Sources, Timing, Unusable, Weights
from loadtest.peers.checkpoint_source import CheckpointSource
from loadtest.peers.folder import shape
from loadtest.peers.precision import options_of, reads
from loadtest.tickets import greedy_ticket
from pdbus.context import Deadline
from pdbus.engine.core import Core
from pdbus.engine.scheduler import Limits
from pdbus.engine.sequence import Ended, Event, Produced, Sequence
from pdbus.engine.version import Version, load
from pdbus.model.backend import Backend
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.checkpoint import open_checkpoint
from pdbus.model.config import ModelConfig
from pdbus.model.families import writing

_CHUNK_TOKENS = 512
"""As the workers' default."""
_RUNNING = 64
_ANSWER_S = 600.0


@dataclass
class _Watch:
    """Hears the engine's events for one call."""

    clock: Clock
    prompts: int
    ended: int = 0
    ids: list[int] = field(default_factory=list)
    """New tokens of the first prompt."""
    error: BaseException | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Produced) and event.sequence.ticket.request_id == "0":
                self.clock.token()
                self.ids += event.ids
            if isinstance(event, Ended):
                self.ended += 1
                self.error = self.error or event.error
        if self.ended == self.prompts or self.error:
            self.over.set()


class _Engine:
    def __init__(self, checkpoint: Path, options: BackendOptions, weights: Weights) -> None:
        opened = open_checkpoint(checkpoint)
        source = CheckpointSource(opened)
        self._backend = open_backend(options, writing(opened.config))

        async def backend_for(config: ModelConfig) -> Backend:
            return self._backend

        loading = load(source.known.root, source, (), backend_for, lambda done, total: None)
        self._version: Version = asyncio.run(loading)
        self.weights = weights

    def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        return asyncio.run(self._generate(prompts, new_tokens))

    async def _generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        page_format = self._version.scope.page_format
        pages = len(prompts) * page_format.pages_for(len(prompts[0]) + new_tokens)
        pool = self._backend.pool(page_format, pages)
        limits = Limits(page_format.page_tokens, _CHUNK_TOKENS, _RUNNING)
        watch = _Watch(Clock(), len(prompts))
        async with Core(pool, limits, watch.hear, lambda error: watch.over.set()) as core:
            watch.clock = Clock()
            for number, prompt in enumerate(prompts):
                core.submit(self._sequence(core, number, prompt, new_tokens))
            async with asyncio.timeout(_ANSWER_S):
                await watch.over.wait()
        if watch.error or watch.ended < len(prompts):
            raise Unusable(f"the engine failed: {watch.error}")
        return watch.clock.timing(watch.ids)

    def _sequence(self, core: Core, number: int, prompt: Collection[int], new_tokens: int) -> Sequence:
        deadline = Deadline.after(_ANSWER_S)
        ticket = greedy_ticket(number, self._version.root, prompt, new_tokens, deadline)
        return Sequence(ticket, self._version, deadline, core.pages.hold())


@dataclass(frozen=True)
class Ours:
    row: str

    def prepare(self, sources: Sources) -> Path:
        return sources.gguf or sources.folder

    def open(self, path: Path, sources: Sources, threads: int) -> _Engine:
        return _Engine(path, options_of(self.row, threads), reads(self.row, shape(sources)))
