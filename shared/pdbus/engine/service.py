"""The service around an engine: versions by the change log, the worker once there is a first one, and its card."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.engine.hang_watch import HangWatch
from pdbus.engine.invalidations import follow_invalidations
from pdbus.engine.progress import Progress
from pdbus.engine.scheduler import Limits
from pdbus.engine.settings import EngineSettings
from pdbus.engine.versions import Versions
from pdbus.engine.worker import Worker
from pdbus.errors import PdbusError, Unavailable
from pdbus.kv.codec import PagePool
from pdbus.messages.presence import Card, Load
from pdbus.model.backends import BackendOptions, open_backend
from pdbus.peers.history import HistoryFollower
from pdbus.peers.model_cache import ModelCache
from pdbus.peers.weights import BlockReader
from pdbus.runtime.service import Service
from pdbus.settings import SettingsError
from pdbus.tasks import cancelled

S = TypeVar("S", bound=EngineSettings)

_LOG_S = 10.0


class EngineService(Service[S], Generic[S]):
    """Starting takes until a first version is loaded; then the page pool can be made, and the worker serves."""

    def __init__(self, settings: S, bus: Bus) -> None:
        super().__init__(settings, bus)
        self.fleet = Fleet(bus)
        self._history = HistoryFollower(bus, settings.model)
        self._cache = ModelCache.open(settings.weight_cache, settings.weight_cache_bytes)
        if settings.weight_bytes is not None and self._cache.folder is None:
            raise SettingsError(f"PDBUS_WEIGHT_BYTES: layers can't be streamed from the folder {settings.weight_cache}")
        self._reader = BlockReader(bus, settings.model, self._history, self._cache)
        options = BackendOptions(
            settings.engine,
            settings.precision,
            settings.kv_dtype,
            settings.device,
            settings.threads,
            settings.cores_file,
            self._cache.folder,
            settings.weight_bytes,
            settings.layer_groups,
        )
        kept = partial(self._cache.count, "kept")
        opening = partial(open_backend, options)
        self.versions = Versions(self._reader, opening, self._on_versions, kept, self._reader)
        self.worker: Worker[Any] | None = None
        self._hang: HangWatch | None = None

    @abstractmethod
    async def make_worker(self, pool: PagePool, limits: Limits, stack: contextlib.AsyncExitStack) -> Worker[Any]:
        """The worker, not yet entered. What it needs for its whole life goes onto `stack`."""

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await self.bus.logs.ensure()
            for part in (self.fleet, self._history):
                await stack.enter_async_context(part)
            with contextlib.suppress(PdbusError):  # then it learns by and by which versions are wanted, oldest first
                await self._history.caught_up(Deadline.after(_LOG_S))
            await self.start(stack)
            self._stack = stack.pop_all()
        return self

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Returns once requests can be served. What has to be ended goes onto `stack`."""
        await stack.enter_async_context(self.versions)
        stack.callback(self._history.on_change(self.versions.follow))
        stack.callback(self._history.on_change(lambda _: self.changed.set()))
        self.versions.follow(self._history.history)
        version = await self.versions.first()
        page_format = version.scope.page_format
        page_bytes = page_format.page_bytes + version.streams.page_bytes
        pages = self.settings.kv_bytes // page_bytes
        if pages < 1:
            raise SettingsError(f"PDBUS_KV_BYTES is less than one page, {page_bytes} bytes")
        assert self.versions.backend, "a version has been built by it"
        pool = self.versions.backend.pool(page_format, pages, version.streams)
        limits = Limits(page_format.page_tokens, self.settings.chunk_tokens, self.settings.most_running)
        self.worker = await self.make_worker(pool, limits, stack)
        await self.watch(self.worker.core.progress, self.worker.core.give_up, stack)
        await stack.enter_async_context(self.worker)
        follow = follow_invalidations(self.bus, self.settings.model, self.versions, self.worker.core)
        stack.push_async_callback(cancelled, asyncio.create_task(follow))
        self.worker.failed.add_done_callback(self._on_failed)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def load(self) -> Load:
        return self.worker.load() if self.worker else Load()

    def card(self, card: Card) -> Card:
        roots, page_format = self.versions.roots, self.versions.page_format
        told = replace(
            card,
            state=card.state if roots and self.worker else "starting",
            roots=roots,
            compute_class=self.versions.compute_class,
            page_format=str(page_format) if page_format else "",
            local_tokens=self.worker.local_tokens if self.worker else 0,
            detail=self.versions.detail,
            step_ms=self.worker.core.step_s * 1e3 if self.worker else 0.0,
            progress=self.worker.core.progress.count if self.worker else 0,
            log_seq=self._history.seq,
        )
        return self.told(told)

    def told(self, card: Card) -> Card:
        """The card, which says so where the engine's thread hangs."""
        return self._hang.told(card) if self._hang else card

    async def watch(
        self, progress: Progress, give_up: Callable[[Unavailable], object], stack: contextlib.AsyncExitStack
    ) -> None:
        """To be called before what is watched starts, so that it is watched to its end."""
        self._hang = await stack.enter_async_context(HangWatch(progress, self.changed.set, give_up))

    def held(self) -> dict[str, int]:
        return {"pins": self.versions.pins} | (self.worker.held() if self.worker else {})

    def kept(self) -> dict[str, int]:
        return {"versions": len(self.versions.roots)} | (self.worker.kept() if self.worker else {})

    async def stop_intake(self) -> None:
        if self.worker:
            await self.worker.stop_intake()

    async def drain(self, deadline: Deadline) -> None:
        if self.worker:
            await self.worker.drain()

    def _on_versions(self) -> None:
        self.changed.set()
        if recorder := self.bus.recorder:
            for root in self.versions.roots:
                recorder.put("loaded", root=root, kv_root=self.versions.kv_roots.get(root))

    def _on_failed(self, failed: asyncio.Future[None]) -> None:
        if not failed.cancelled() and (error := failed.exception()):
            self.fail(error)
