"""One version on one engine, and its core as the workers run it: scheduler, step loop, page table, sampler."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from loadtest.peers.checkpoint_source import CheckpointSource
from loadtest.tickets import greedy_ticket
from pdbus.context import Deadline
from pdbus.engine.core import Core
from pdbus.engine.scheduler import Limits
from pdbus.engine.sequence import Ended, Event, Produced, Started
from pdbus.engine.sequence import Sequence as EngineSequence
from pdbus.engine.version import Version, load
from pdbus.kv.format import PageFormat
from pdbus.kv.prefix import PageKey, page_keys
from pdbus.kv.swap_file import SwapFile
from pdbus.messages.common import Ticket
from pdbus.model.backend import Backend
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.model.checkpoint import Checkpoint
from pdbus.model.config import ModelConfig
from pdbus.model.families import writing
from pdbus.model.sampler import Sampled, Sampler

_ANSWER_S = 600.0
_RUNNING = 64


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    """A digest of the whole row of logits that each id was chosen from; none where nobody wanted them."""
    cached_tokens: int = 0
    """Tokens of the prompt whose KV was not computed."""


class _Witness(Sampler):
    """Digests the logits that it chooses from."""

    def __init__(self, ticket: Ticket, delivered: Sequence[int], logits: list[bytes]) -> None:
        super().__init__(ticket.sampling, seed=ticket.seed, choice=0, prompt=ticket.prompt, delivered=delivered)
        self._logits = logits

    def choose(self, logits: np.ndarray[Any, np.dtype[np.float32]], best: int | None = None) -> Sampled:
        self._logits.append(hashlib.blake2b(np.ascontiguousarray(logits).data, digest_size=16).digest())
        return super().choose(logits, best)


@dataclass
class _Asked:
    answer: Answer
    ended: asyncio.Future[None]
    on_start: Callable[[EngineSequence], None] | None = None


class Computes(Protocol):
    """One version on one backend."""

    @property
    def backend(self) -> Backend: ...

    @property
    def version(self) -> Version: ...

    @property
    def page_format(self) -> PageFormat: ...


class Running:
    """A core that runs, and what it says. Greedy, past any end token."""

    def __init__(self, engine: Computes, pages: int, chunk_tokens: int, swap: SwapFile | None) -> None:
        self.engine = engine
        self.pool = engine.backend.pool(engine.page_format, pages)
        self._asked: dict[EngineSequence, _Asked] = {}
        self._numbers = itertools.count()
        limits = Limits(engine.page_format.page_tokens, chunk_tokens, _RUNNING)
        self.core = Core(self.pool, limits, self._hear, self._fail, swap)

    def sequence(self, prompt: Sequence[int], new_tokens: int, **fields: Any) -> EngineSequence:
        """Of greedy sampling. `fields`: of the Sequence, besides ticket and version."""
        deadline = Deadline.after(_ANSWER_S)
        ticket = greedy_ticket(next(self._numbers), self.engine.version.root, prompt, new_tokens, deadline)
        known = {"hold": self.core.pages.hold()} | fields
        return EngineSequence(ticket, self.engine.version, deadline, **known)

    async def answer(
        self,
        sequence: EngineSequence,
        on_start: Callable[[EngineSequence], None] | None = None,
        witnessed: bool = True,
    ) -> Answer:
        """Runs it to its end; raises what it ended with. `on_start`: called in the loop once it has its pages."""
        asked = _Asked(Answer(), asyncio.get_running_loop().create_future(), on_start)
        if witnessed:
            sequence.sampler = _Witness(sequence.ticket, sequence.sampled, asked.answer.logits)
        self._asked[sequence] = asked
        self.core.submit(sequence)
        await asked.ended
        return asked.answer

    def _hear(self, events: list[Event]) -> None:
        for event in events:
            asked = self._asked[event.sequence]
            if isinstance(event, Started):
                asked.answer.cached_tokens += event.cached_tokens
                if asked.on_start:
                    asked.on_start(event.sequence)
            elif isinstance(event, Produced):
                asked.answer.ids += event.ids
            elif isinstance(event, Ended):
                del self._asked[event.sequence]
                if event.error:
                    asked.ended.set_exception(event.error)
                else:
                    asked.ended.set_result(None)

    def _fail(self, error: BaseException) -> None:
        for asked in self._asked.values():
            asked.ended.set_exception(error)


class Engine:
    """Raises InvalidRequest where the engine asked for can't serve here. Closed by its owner."""

    def __init__(self, checkpoint: Checkpoint, options: BackendOptions) -> None:
        source = CheckpointSource(checkpoint)
        self.backend = open_backend(options, writing(checkpoint.config))

        async def backend_for(config: ModelConfig) -> Backend:
            return self.backend

        self.version: Version = asyncio.run(load(source.known.root, source, (), backend_for, lambda done, total: None))

    @property
    def page_format(self) -> PageFormat:
        return self.version.scope.page_format

    def keys(self, prompt: Sequence[int]) -> tuple[PageKey, ...]:
        return page_keys(prompt, self.version.scope)

    @asynccontextmanager
    async def running(self, pages: int, chunk_tokens: int, swap: SwapFile | None = None) -> AsyncIterator[Running]:
        running = Running(self, pages, chunk_tokens, swap)
        async with running.core:
            yield running

    def close(self) -> None:
        self.backend.close()
