"""Prefill workers of an encoder as the source of embeddings."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pdbus.backoff import backoff_s
from pdbus.bus.bus import Bus
from pdbus.caching.feature_key import FeatureKey, embedding_key
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Corrupt, DeadlineExceeded, PdbusError, Unavailable
from pdbus.messages.common import Digest
from pdbus.messages.prefill import MOST_TEXTS, Embed
from pdbus.messages.presence import Card
from pdbus.router.feature_source import Feature
from pdbus.router.workers import Workers
from pdbus.runtime.first import first
from pdbus.subjects import PREFILL_EMBED

Ids = tuple[int, ...]

_MOST_TOKENS = 4096
"""Of the texts of one message: a second or so of work."""
_PIECES_PER_WORKER = 2
_NO_WORKER_S = 5.0
"""How long a request waits while no worker is there at all."""


class Encoders:
    """The workers of one model. Used from one event loop."""

    def __init__(self, bus: Bus, workers: Workers, model: str, rng: random.Random) -> None:
        self._bus, self._workers, self._model, self._rng = bus, workers, model, rng
        self._mine: Counter[str] = Counter()
        """Messages that each worker has of ours."""

    async def compute_class(self, root: Digest, deadline: Deadline) -> str:
        """That of the most workers that hold the version. Raises Unavailable where there are none for some seconds."""
        if not self._workers.encoders(root, or_load=True):
            try:
                await self._workers.fleet.wait_for(
                    lambda _: bool(self._workers.encoders(root, or_load=True)), deadline.within(_NO_WORKER_S)
                )
            except DeadlineExceeded:
                deadline.check("a worker was there")
        counted = Counter(card.compute_class for card in self._workers.encoders(root, or_load=True))
        if not counted:
            raise Unavailable("no prefill worker serves this version", retry_after_s=2.0)
        return max(counted, key=lambda name: (counted[name], name))

    async def vectors(
        self, root: Digest, compute_class: str, dimensions: int, texts: Sequence[Ids], ctx: RequestContext
    ) -> list[bytes]:
        """One for each text, all of one compute class, several pieces at once.

        Raises DeadlineExceeded, Unavailable where workers of other classes only are there, what can't be retried."""
        vectors = [b""] * len(texts)
        at_once = asyncio.Semaphore(_PIECES_PER_WORKER * max(len(self._workers.encoders(root, or_load=True)), 1))

        async def compute(places: list[int]) -> None:
            async with at_once:
                wanted = Embed(self._model, root, tuple(texts[at] for at in places))
                computed = await self._piece(wanted, compute_class, dimensions, ctx)
            for at, vector in zip(places, computed, strict=True):
                vectors[at] = vector

        try:
            async with asyncio.TaskGroup() as group:
                for places in pieces(texts):
                    group.create_task(compute(places))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return vectors

    async def _piece(
        self, wanted: Embed, compute_class: str, dimensions: int, ctx: RequestContext
    ) -> tuple[bytes, ...]:
        """By whichever worker can, again and again until the deadline."""
        retries = 0
        avoid: frozenset[str] = frozenset()
        while True:
            card = await self._choose(wanted.root, compute_class, avoid, ctx.deadline)
            try:
                return await self._ask(card, wanted, dimensions, ctx)
            except PdbusError as error:
                if not error.retryable:
                    raise
                avoid = avoid | {card.id} if len(avoid) < 8 else frozenset()
                retries += 1
                wait_s = backoff_s(retries, self._rng)
                if wait_s >= ctx.deadline.remaining_s:
                    raise DeadlineExceeded(f"no time is left for another attempt ({error.message})") from None
            await asyncio.sleep(wait_s)

    async def _choose(self, root: Digest, compute_class: str, avoid: frozenset[str], deadline: Deadline) -> Card:
        """The least loaded one; `avoid`: only if there are no others."""
        found = self._workers.encoders(root, or_load=True)
        if not found:
            await self.compute_class(root, deadline)
            found = self._workers.encoders(root, or_load=True)
        same = [card for card in found if card.compute_class == compute_class]
        if not same:
            raise Unavailable("the workers of this version compute in another way now", retry_after_s=1.0)
        able = [card for card in same if card.id not in avoid] or same
        return min(able, key=lambda card: (self._load(card), self._rng.random()))

    def _load(self, card: Card) -> int:
        """What we gave it since counts before its card tells."""
        return max(self._mine[card.id], card.load.running + card.load.waiting)

    async def _ask(self, card: Card, wanted: Embed, dimensions: int, ctx: RequestContext) -> tuple[bytes, ...]:
        """Raises what the worker does, Unavailable as soon as it is known to be gone, Corrupt."""
        vectors: tuple[bytes, ...] = ()

        async def ask() -> None:
            nonlocal vectors
            reply = await self._bus.call(PREFILL_EMBED(worker=card.id), wanted, ctx)
            vectors = reply.vectors
            told = (reply.root, reply.compute_class, [len(vector) for vector in vectors])
            if told != (wanted.root, card.compute_class, [4 * dimensions] * len(wanted.texts)):
                raise Corrupt(f"worker {card.id} sent vectors of another version or size")

        async def gone() -> None:
            later = Deadline(ctx.deadline.at_monotonic_s + 1.0)  # so that it is the call that tells of the deadline
            await self._workers.fleet.wait_for(lambda _: self._workers.gone(card.id, card.incarnation), later)
            raise Unavailable(f"worker {card.id} is gone")

        self._mine[card.id] += 1
        try:
            await first(ask(), gone())
        finally:
            self._mine[card.id] -= 1
            if not self._mine[card.id]:
                del self._mine[card.id]
        return vectors


def pieces(texts: Sequence[Ids]) -> list[list[int]]:
    """Places of texts that go in one message: texts of like length together, so that a worker computes them so."""
    found: list[list[int]] = []
    tokens = 0
    for at in sorted(range(len(texts)), key=lambda at: len(texts[at])):
        size = len(texts[at])
        if not found or len(found[-1]) >= MOST_TEXTS or tokens + size > _MOST_TOKENS:
            found.append([])
            tokens = 0
        found[-1].append(at)
        tokens += size
    return found


@dataclass(frozen=True)
class EmbeddingSource:
    """The embeddings of one version for one tenant: a FeatureSource whose items are token ids."""

    encoders: Encoders
    tenant: str
    salt: bytes
    root: Digest
    compute_class: str
    dimensions: int
    kind: str = "encoder"

    def key(self, item: Ids) -> FeatureKey:
        return embedding_key(
            tenant=self.tenant, salt=self.salt, root=self.root, compute_class=self.compute_class, ids=item
        )

    def valid(self, value: bytes) -> bool:
        return len(value) == 4 * self.dimensions

    async def version(self, ctx: RequestContext) -> str:
        return ""

    async def fetch(self, items: Sequence[Ids], ctx: RequestContext) -> Sequence[Feature]:
        vectors = await self.encoders.vectors(self.root, self.compute_class, self.dimensions, items, ctx)
        return [Feature("", vector) for vector in vectors]
