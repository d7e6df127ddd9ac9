"""The prefill worker of an encoder: texts as token ids in, vectors out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import groupby
from types import TracebackType
from typing import Self

import torch

from pdbus.bus.bus import Bus
from pdbus.bus.serving import Registration
from pdbus.canonical import DIGEST_BYTES
from pdbus.context import Deadline, RequestContext
from pdbus.engine.encoder_versions import EncoderVersions
from pdbus.engine.progress import Progress
from pdbus.engine.worker import LOAD_S
from pdbus.errors import InvalidRequest, TooLarge
from pdbus.messages.common import Digest
from pdbus.messages.prefill import MOST_TEXTS, Embed, Embedded
from pdbus.messages.presence import Card, Load
from pdbus.model.encoder import Encoder
from pdbus.model.encoder_config import EncoderConfig
from pdbus.subjects import PREFILL_EMBED
from pdbus.telemetry.spans import meter, tracer

_MOST_REQUESTS = 64
_TOGETHER = 16
"""Texts of one length that are computed at once: more gains little, and a request that is given up ends later."""


class EncoderWorker:
    """Entered, it serves. Requests are computed one after another, in a thread of its own."""

    def __init__(self, bus: Bus, id: str, model: str, versions: EncoderVersions, threads: int) -> None:
        self._bus, self._id, self._model, self._versions = bus, id, model, versions
        self._thread = ThreadPoolExecutor(1, "encoder", initializer=torch.set_num_threads, initargs=(threads,))
        self._requests = 0
        self.progress = Progress()
        self._serving: Registration[Embed, Embedded] | None = None
        self._texts = meter().create_counter("pdbus.encoder.texts", "{text}", "Texts embedded")
        self._tokens = meter().create_counter("pdbus.encoder.tokens", "{token}", "Their tokens")

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, self._thread.shutdown)
            self._serving = await self._bus.serve(PREFILL_EMBED(worker=self._id), self.embed, limit=_MOST_REQUESTS)
            await stack.enter_async_context(self._serving)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def stop_intake(self) -> None:
        if self._serving:
            await self._serving.stop()

    async def drain(self, deadline: Deadline) -> None:
        if self._serving:
            await self._serving.drain(deadline)

    def load(self) -> Load:
        running = min(self._requests, 1)
        return Load(running=running, waiting=self._requests - running)

    def held(self) -> dict[str, int]:
        return {"requests": self._requests}

    def card(self, card: Card) -> Card:
        return replace(
            card,
            state=card.state if self._versions.roots and self._serving else "starting",
            roots=self._versions.roots,
            compute_class=self._versions.compute_class,
            detail=self._versions.detail,
            progress=self.progress.count,
            embeds=True,
        )

    async def embed(self, message: Embed, ctx: RequestContext) -> Embedded:
        if message.model != self._model:
            raise InvalidRequest(f"this worker serves {self._model}, not {message.model[:128]}", param="model")
        if len(message.root) != DIGEST_BYTES:
            raise InvalidRequest(f"a root has {DIGEST_BYTES} bytes", param="root")
        self._requests += 1
        try:
            version = await self._versions.need(message.root, ctx.deadline.within(LOAD_S))
            _check(message.texts, version.encoder.config)
            with tracer().start_as_current_span("embed") as span:
                span.set_attribute("pdbus.texts", len(message.texts))
                vectors = await self._compute(message.root, version.encoder, message.texts)
        finally:
            self._requests -= 1
        return Embedded(self._id, message.root, self._versions.compute_class, vectors)

    async def _compute(self, root: Digest, encoder: Encoder, texts: Sequence[tuple[int, ...]]) -> tuple[bytes, ...]:
        """Ends within a few texts where nobody waits for it any more."""
        given_up = threading.Event()

        def compute() -> list[bytes]:
            vectors = [b""] * len(texts)
            try:
                for places in together(texts):
                    if given_up.is_set():
                        break
                    size = sum(len(texts[at]) for at in places)
                    self.progress.begin("texts", time.monotonic(), size=size, uses=[root])
                    computed = encoder.embed([texts[at] for at in places]).astype("<f4", copy=False)
                    for at, vector in zip(places, computed, strict=True):
                        vectors[at] = vector.tobytes()
                    self.progress.made(time.monotonic())
            finally:
                self.progress.waits = True
            return vectors

        try:
            vectors = await asyncio.get_running_loop().run_in_executor(self._thread, compute)
        finally:
            given_up.set()
        self._texts.add(len(texts))
        self._tokens.add(sum(map(len, texts)))
        return tuple(vectors)


def together(texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Places of texts of one length, at most `_TOGETHER` of them at a time."""
    by_length = sorted(range(len(texts)), key=lambda at: len(texts[at]))
    for _, places in groupby(by_length, key=lambda at: len(texts[at])):
        group = list(places)
        for start in range(0, len(group), _TOGETHER):
            yield group[start : start + _TOGETHER]


def _check(texts: Sequence[Sequence[int]], config: EncoderConfig) -> None:
    """The router has checked the same in the caller's terms."""
    if not 1 <= len(texts) <= MOST_TEXTS:
        raise InvalidRequest(f"1 to {MOST_TEXTS} texts, not {len(texts)}", param="texts")
    for text in texts:
        if not text:
            raise InvalidRequest("a text has no tokens", param="texts")
        if len(text) > config.max_tokens:
            raise TooLarge(f"a text of {len(text)} tokens is above the limit of {config.max_tokens}", param="texts")
        if not 0 <= min(text) <= max(text) < config.vocab_size:
            raise InvalidRequest(f"a token id is outside the vocabulary of {config.vocab_size}", param="texts")
