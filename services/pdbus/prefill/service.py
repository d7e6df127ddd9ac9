"""The prefill service: of a model that writes text, or of an encoder, as its first version tells."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, ClassVar

from pdbus.bus.bus import Bus
from pdbus.context import Deadline
from pdbus.engine.scheduler import Limits
from pdbus.engine.service import EngineService
from pdbus.kv.codec import PagePool
from pdbus.messages.presence import Card, Load
from pdbus.native.cores import shared_cores
from pdbus.peers.cache import CacheRing
from pdbus.prefill.kind import model_embeds
from pdbus.prefill.settings import PrefillSettings
from pdbus.prefill.worker import PrefillWorker

if TYPE_CHECKING:
    from pdbus.prefill.encoder_worker import EncoderWorker

log = logging.getLogger(__name__)


class PrefillService(EngineService[PrefillSettings]):
    name: ClassVar[str] = PrefillWorker.service

    def __init__(self, settings: PrefillSettings, bus: Bus) -> None:
        super().__init__(settings, bus)
        self._encoder: EncoderWorker | None = None

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        if await model_embeds(self._history, self._reader):
            await self._start_encoder(stack)
        else:
            await super().start(stack)

    async def make_worker(self, pool: PagePool, limits: Limits, stack: contextlib.AsyncExitStack) -> PrefillWorker:
        ring = await stack.enter_async_context(CacheRing(self.bus, self.fleet, replicas=1))
        settings = self.settings
        common = (self.bus, settings.id, settings.model, self.versions, self.fleet, pool, limits)
        return PrefillWorker(*common, ring, shared_cores(settings.cores_file))

    def load(self) -> Load:
        return self._encoder.load() if self._encoder else super().load()

    def card(self, card: Card) -> Card:
        return self.told(self._encoder.card(card)) if self._encoder else super().card(card)

    def held(self) -> dict[str, int]:
        return self._encoder.held() if self._encoder else super().held()

    async def stop_intake(self) -> None:
        await (self._encoder.stop_intake() if self._encoder else super().stop_intake())

    async def drain(self, deadline: Deadline) -> None:
        await (self._encoder.drain(deadline) if self._encoder else super().drain(deadline))

    async def _start_encoder(self, stack: contextlib.AsyncExitStack) -> None:
        # Only here: torch costs a worker that never computes with it 200 MB and seconds of its start.
        from pdbus.engine.encoder_versions import EncoderVersions
        from pdbus.prefill.encoder_worker import EncoderWorker

        settings = self.settings
        if settings.precision != "fp32" or settings.engine == "native":
            log.warning("an encoder is computed by torch in fp32, whatever precision and engine are set")
        versions = EncoderVersions(self._reader, settings.device, self.changed.set)
        await stack.enter_async_context(versions)
        stack.callback(self._history.on_change(versions.follow))
        versions.follow(self._history.history)
        self._encoder = EncoderWorker(self.bus, settings.id, settings.model, versions, settings.threads)
        await versions.first()
        await self.watch(self._encoder.progress, self.fail, stack)
        await stack.enter_async_context(self._encoder)
