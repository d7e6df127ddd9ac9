"""Our own engine in process: scheduler, step loop and sampler as the workers run them, without bus and router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from loadtest.peers.base import Clock, Prompts, Sources, Timing, Unusable, Weights
from loadtest.peers.folder import shape
from loadtest.peers.precision import reads
from pdbus.canonical import content_digest
from pdbus.context import Deadline, RequestContext
from pdbus.engine.core import Core
from pdbus.engine.scheduler import Limits
from pdbus.engine.sequence import Ended, Event, Produced, Sequence
from pdbus.engine.version import Version, load
from pdbus.kv.pool import KvPool
from pdbus.messages.common import Digest, Sampling, Ticket
from pdbus.model.checkpoint import Checkpoint, open_checkpoint
from pdbus.model.compute import compute_class
from pdbus.weights.blocks import cut, dtype_name
from pdbus.weights.layer import Tensor, meta_tensor
from pdbus.weights.manifest import Manifest

_CHUNK_TOKENS = 512
"""As the workers' default."""
_RUNNING = 64
_ANSWER_S = 600.0


class CheckpointSource:
    """The only version there is, straight from its checkpoint: what param-servers are to a worker."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        files = {meta_tensor(n): np.frombuffer(content, np.uint8) for n, content in checkpoint.meta.items()}
        self.known = Manifest.build(_listed(n, a) for part in (checkpoint.tensors(), files.items()) for n, a in part)

    async def manifest(self, root: Digest, ctx: RequestContext) -> Manifest:
        return self.known

    async def meta(self, root: Digest, ctx: RequestContext) -> Mapping[str, bytes]:
        return self._checkpoint.meta

    async def tensors(
        self, root: Digest, ctx: RequestContext, names: Collection[str] | None = None, *, progress: object = None
    ) -> Mapping[str, np.ndarray]:
        return _Lazy(self._checkpoint)


class _Lazy(Mapping[str, np.ndarray]):
    """Reads a tensor when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._source = checkpoint.source

    def __getitem__(self, name: str) -> np.ndarray:
        return self._source.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.shapes)

    def __len__(self) -> int:
        return len(self._source.shapes)


def _listed(name: str, array: np.ndarray) -> Tensor:
    return Tensor(name, dtype_name(array.dtype), array.shape, tuple(content_digest(block) for block in cut(array)))


@dataclass
class _Watch:
    """Hears the engine's events for one call."""

    clock: Clock
    prompts: int
    ended: int = 0
    error: BaseException | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Produced) and event.sequence.ticket.request_id == "0":
                self.clock.token()
            if isinstance(event, Ended):
                self.ended += 1
                self.error = self.error or event.error
        if self.ended == self.prompts or self.error:
            self.over.set()


class _Engine:
    def __init__(self, checkpoint: Path, weights: Weights, threads: int) -> None:
        torch.set_num_threads(threads)
        source = CheckpointSource(open_checkpoint(checkpoint))
        loading = load(source.known.root, source, (), "cpu", compute_class("cpu"), lambda done, total: None)
        self._version: Version = asyncio.run(loading)
        self.weights = weights

    def generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        return asyncio.run(self._generate(prompts, new_tokens))

    async def _generate(self, prompts: Prompts, new_tokens: int) -> Timing:
        page_format = self._version.model.page_format()
        pool = KvPool(page_format, len(prompts) * page_format.pages_for(len(prompts[0]) + new_tokens))
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
        return watch.clock.timing()

    def _sequence(self, core: Core, number: int, prompt: Collection[int], new_tokens: int) -> Sequence:
        ticket = Ticket(
            request_id=str(number),
            choice=0,
            attempt=1,
            router="",
            model="",
            root=self._version.root,
            tenant="",
            salt=b"",
            prompt=tuple(prompt),
            delivered=(),
            sampling=Sampling(temperature=0.0),
            seed=0,
            max_tokens=new_tokens,
            stop_ids=(),
            deadline_ns=time.time_ns() + int(_ANSWER_S * 1e9),
        )
        return Sequence(ticket, self._version, Deadline.after(_ANSWER_S), core.pages.hold())


@dataclass(frozen=True)
class Ours:
    precision: str

    def prepare(self, sources: Sources) -> Path:
        return sources.gguf or sources.folder

    def open(self, path: Path, sources: Sources, threads: int) -> _Engine:
        return _Engine(path, reads(self.precision, shape(sources)), threads)
