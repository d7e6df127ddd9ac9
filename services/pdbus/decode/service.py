"""The decode service."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from pdbus.decode.settings import DecodeSettings
from pdbus.decode.worker import DecodeWorker
from pdbus.engine.scheduler import Limits
from pdbus.engine.service import EngineService
from pdbus.kv.codec import PagePool
from pdbus.kv.swap_file import SwapFile
from pdbus.native.cores import shared_cores
from pdbus.peers.cache import CacheRing


class DecodeService(EngineService[DecodeSettings]):
    name: ClassVar[str] = DecodeWorker.service

    @property
    def moved(self) -> int:
        return self.worker.mover.moved if isinstance(self.worker, DecodeWorker) else 0

    async def make_worker(self, pool: PagePool, limits: Limits, stack: contextlib.AsyncExitStack) -> DecodeWorker:
        settings = self.settings
        ring = await stack.enter_async_context(CacheRing(self.bus, self.fleet, replicas=1))
        swap = stack.enter_context(SwapFile(settings.data, settings.swap_bytes, pool.format.page_bytes))
        common = (self.bus, settings.id, settings.model, self.versions, self.fleet, pool, limits)
        return DecodeWorker(
            *common,
            ring,
            swap,
            shared_cores(settings.cores_file),
            colocated=settings.colocated,
            snapshot_tokens=settings.snapshot_tokens,
        )
