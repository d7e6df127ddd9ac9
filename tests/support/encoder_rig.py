"""A router and prefill workers of tiny encoders on the in-memory bus, with cache nodes that never forget."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pdbus.bus.bus import Bus, memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.bus.presence import Fleet, Presence
from pdbus.context import Deadline, RequestContext
from pdbus.engine.encoder_versions import EncoderVersions
from pdbus.errors import PdbusError
from pdbus.messages.changelog import Commit, LogEntry, Ref
from pdbus.messages.prefill import Embed, Embedded
from pdbus.messages.presence import Card
from pdbus.prefill.encoder_worker import EncoderWorker
from pdbus.router.settings import RouterSettings
from pdbus.router.wiring import Router, router
from pdbus.weights.history import History
from tests.support.feature_entries import DictEntries
from tests.support.router_rig import DictRing, until
from tests.support.workers import LocalSource

MODEL = "tiny-encoder"


class LocalVersions:
    """Stands for the change log's follower: all versions of a source committed, `stable` on the first."""

    def __init__(self, source: LocalSource) -> None:
        self.history = History()
        self.confirmed_age_s = 0.0
        self._callbacks: list[Callable[[History], object]] = []
        for root in source.root_of.values():
            self._append(LogEntry(commit=Commit(root.hex(), root, None, "test", "", ())))
        self.move("stable", next(iter(source.root_of.values())))

    def move(self, ref: str, root: bytes, share: float | None = None) -> None:
        self._append(LogEntry(ref=Ref(ref, root, "test", share=share)))

    async def caught_up(self, deadline: Deadline) -> None:
        """There is nothing else."""

    def on_change(self, callback: Callable[[History], object]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def _append(self, entry: LogEntry) -> None:
        self.history.apply(self.history.seq + 1, 0, entry)
        for callback in tuple(self._callbacks):
            callback(self.history)


class WatchedWorker(EncoderWorker):
    """Remembers what it was asked, and can be made to fail, wait or lie."""

    asked: list[Embed]
    refuse: PdbusError | None = None
    hold: asyncio.Event | None = None
    """Requests wait for it."""
    tamper: Callable[[Embedded], Embedded] = staticmethod(lambda reply: reply)

    @property
    def texts(self) -> int:
        return sum(len(message.texts) for message in self.asked)

    async def embed(self, message: Embed, ctx: RequestContext) -> Embedded:
        self.asked.append(message)
        if self.hold:
            await self.hold.wait()
        if self.refuse:
            raise self.refuse
        return self.tamper(await super().embed(message, ctx))


@dataclass
class EncoderRig:
    bus: Bus
    broker: MemoryBroker
    versions: LocalVersions
    workers: list[WatchedWorker]
    entries: DictEntries
    router: Router
    source: LocalSource
    lives: list[AsyncExitStack] = field(default_factory=list)
    """Of the workers."""

    @property
    def url(self) -> str:
        return self.router.http.url

    @property
    def texts(self) -> int:
        """That workers were asked for."""
        return sum(worker.texts for worker in self.workers)

    @property
    def waiting(self) -> int:
        """Requests that wait for what they, or others before them, have asked for."""
        return sum(flight.waiting for flight in self.router.features._flights._all)

    async def until_written(self) -> None:
        await until(lambda: self.router.features.idle)


async def ask(
    http: aiohttp.ClientSession, headers: dict[str, str] | None = None, **body: Any
) -> tuple[int, dict[str, Any], str]:
    async with http.post("/v1/embeddings", json={"model": MODEL, **body}, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers.get("X-Feature-Cache", "")


@asynccontextmanager
async def encoder_rig(source: LocalSource, workers: int = 1, **settings: Any) -> AsyncIterator[EncoderRig]:
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        bus = await enter(memory_bus(broker))
        fleet = await enter(Fleet(bus))
        made: list[WatchedWorker] = []
        lives: list[AsyncExitStack] = []
        for number in range(workers):
            life = await enter(AsyncExitStack())
            made.append(await _worker(life, broker, f"prefill-{number}", source))
            lives.append(life)
        await fleet.wait_for(lambda f: len(f.live("prefill")) == workers, Deadline.after(30))
        versions, entries = LocalVersions(source), DictEntries()
        chosen = RouterSettings(**({"id": "r-0", "model": MODEL, "http_port": 0} | settings))
        made_router = await enter(router(chosen, bus, fleet, versions, source, DictRing(), entries))  # type: ignore[arg-type]
        for root in source.root_of.values():
            await made_router.frontend.models.encoder(root, Deadline.after(30))
        yield EncoderRig(bus, broker, versions, made, entries, made_router, source, lives)


async def _worker(life: AsyncExitStack, broker: MemoryBroker, id_: str, source: LocalSource) -> WatchedWorker:
    bus = await life.enter_async_context(memory_bus(broker))
    versions = await life.enter_async_context(EncoderVersions(source, "cpu"))
    versions.want(source.root_of.values())
    for root in source.root_of.values():
        await versions.need(root, Deadline.after(30))
    worker = WatchedWorker(bus, id_, MODEL, versions, 1)
    worker.asked = []
    await life.enter_async_context(worker)

    def card(seq: int) -> Card:
        return worker.card(Card("prefill", id_, bus.incarnation, seq, "ready", MODEL, load=worker.load()))

    await life.enter_async_context(Presence(bus, card))
    return worker
