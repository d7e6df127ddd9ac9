"""One process for the weights of one model, or of several.

Who holds a model's weights, that model's log says; a process joins the logs of the models that it is told to serve and
of no others. So a model that is much hotter than the rest gets servers of its own, a group, by naming it to them alone,
while the rest share theirs. Each model has its own folder, membership and card here: to readers and pushers a process
of three models is three servers.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from pdbus.bus.bus import Bus
from pdbus.bus.presence import Presence
from pdbus.context import Deadline
from pdbus.messages.presence import Card, Load, State
from pdbus.param_server.service import ParamServerService
from pdbus.param_server.settings import SERVICE, ParamServerSettings
from pdbus.runtime import Service
from pdbus.settings import SettingsError
from pdbus.tasks import cancelled


def settings_of(settings: ParamServerSettings, model: str) -> ParamServerSettings:
    """Of the server of one model in this process. That of PDBUS_MODEL has the process's own id and folder.

    Raises SettingsError where the id is too long for a model's mark behind it."""
    if model == settings.model:
        return settings
    mark = hashlib.sha256(model.encode()).hexdigest()[:8]
    folder = Path(f"{re.sub(r'[^A-Za-z0-9_-]', '-', model)[:40]}-{mark}")
    return replace(settings, model=model, id=f"{settings.id}-{mark}", data=settings.data / folder, checkpoint=None)


class ParamServers(Service[ParamServerSettings]):
    """Raises SettingsError for a checkpoint of a model that isn't served here."""

    name: ClassVar[str] = SERVICE

    def __init__(self, settings: ParamServerSettings, bus: Bus) -> None:
        super().__init__(settings, bus)
        models = tuple(dict.fromkeys(settings.param_models)) or (settings.model,)
        if settings.checkpoint and settings.model not in models:
            raise SettingsError(f"PDBUS_CHECKPOINT is of {settings.model}, which PDBUS_PARAM_MODELS doesn't name")
        self._servers = [ParamServerService(settings_of(settings, model), bus) for model in models]
        self._ready: set[str] = set()
        self._draining = False
        self._life = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as life:
            for server in self._servers:
                if server.settings.model != self.settings.model:  # the runtime shows that one's card
                    await life.enter_async_context(Presence(self.bus, partial(self._card, server)))
            for server in self._servers:
                await life.enter_async_context(server)
                self._ready.add(server.settings.id)
                life.push_async_callback(cancelled, asyncio.create_task(self._watch(server)))
            self._life = life.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._life.aclose()

    async def stop_intake(self) -> None:
        self._draining = True
        for server in self._servers:
            await server.stop_intake()

    async def drain(self, deadline: Deadline) -> None:
        await asyncio.gather(*(server.drain(deadline) for server in self._servers))

    def load(self) -> Load:
        loads = [server.load() for server in self._servers]
        return Load(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            streams=self.bus.bulk.open_streams,
        )

    def card(self, card: Card) -> Card:
        own = next((server for server in self._servers if server.settings.model == card.model), None)
        if own:
            return own.card(card)
        return replace(card, detail=f"serves {', '.join(server.settings.model for server in self._servers)}")

    def _card(self, server: ParamServerService, seq: int) -> Card:
        state: State = "draining" if self._draining else "ready" if server.settings.id in self._ready else "starting"
        settings, bus = server.settings, self.bus
        return server.card(
            Card(
                SERVICE,
                settings.id,
                bus.incarnation,
                seq,
                state,
                settings.model,
                load=server.load(),
                bulk=bus.bulk.address,
            )
        )

    async def _watch(self, server: ParamServerService) -> None:
        await server.failed.wait()
        assert server.failure, "it says what failed"
        self.fail(server.failure)
