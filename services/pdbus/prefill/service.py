"""The prefill service."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from pdbus.engine.scheduler import Limits
from pdbus.engine.service import EngineService
from pdbus.kv.pool import KvPool
from pdbus.peers.cache import CacheRing
from pdbus.prefill.settings import PrefillSettings
from pdbus.prefill.worker import PrefillWorker


class PrefillService(EngineService[PrefillSettings]):
    name: ClassVar[str] = PrefillWorker.service

    async def make_worker(self, pool: KvPool, limits: Limits, stack: contextlib.AsyncExitStack) -> PrefillWorker:
        ring = await stack.enter_async_context(CacheRing(self.bus, self.fleet, replicas=1))
        return PrefillWorker(
            self.bus, self.settings.id, self.settings.model, self.versions, self.fleet, pool, limits, ring
        )
