"""The decode service."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from pdbus.decode.settings import DecodeSettings
from pdbus.decode.worker import DecodeWorker
from pdbus.engine.scheduler import Limits
from pdbus.engine.service import EngineService
from pdbus.kv.pool import KvPool


class DecodeService(EngineService[DecodeSettings]):
    name: ClassVar[str] = DecodeWorker.service

    async def make_worker(self, pool: KvPool, limits: Limits, stack: contextlib.AsyncExitStack) -> DecodeWorker:
        return DecodeWorker(self.bus, self.settings.id, self.settings.model, self.versions, self.fleet, pool, limits)
