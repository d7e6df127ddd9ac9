"""Tells whoever asks how hot this server's blocks are."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from pdbus.bus.bus import Bus
from pdbus.bus.serving import Registration
from pdbus.context import RequestContext
from pdbus.errors import InvalidRequest
from pdbus.messages.param_server import HeatReply, HeatWanted
from pdbus.param_server.heat import HALF_LIFE_S, Heat
from pdbus.subjects import WEIGHTS_HEAT

MOST_BLOCKS, MOST_TENSORS = 2048, 4096
"""In one answer, which has to fit a message."""


class HeatTeller:
    """While entered, answers under this server's own name."""

    def __init__(self, bus: Bus, model: str, server: str, heat: Heat) -> None:
        self._bus, self._server, self._heat = bus, server, heat
        self._to = WEIGHTS_HEAT(model=model, server=server)
        self._serving: Registration[HeatWanted, HeatReply] | None = None

    async def __aenter__(self) -> Self:
        self._serving = await self._bus.serve(self._to, self._answer)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._serving:
            await self._serving.close()

    async def _answer(self, message: HeatWanted, ctx: RequestContext) -> HeatReply:
        if not 0 <= message.most <= MOST_BLOCKS:
            raise InvalidRequest(f"0 to {MOST_BLOCKS} blocks, not {message.most}", param="most")
        tensors = self._heat.tensors()[:MOST_TENSORS]
        return HeatReply(self._server, HALF_LIFE_S, tensors, self._heat.blocks(message.most))
