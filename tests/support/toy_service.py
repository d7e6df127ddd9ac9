"""A service that only tells what the runtime makes it do: `python -m tests.support.toy_service`."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Self

from pdbus.bus.bus import Bus
from pdbus.context import Deadline
from pdbus.messages.presence import Card, Load
from pdbus.runtime import Service, run
from pdbus.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ToySettings(Settings):
    toy: Literal["well", "slow_start", "bad_start", "slow_drain", "fails", "sticks"] = "well"
    http_port: int | None = None
    """Answers every HTTP request with 200 there, as a router that is ready does; 0: on a free port."""


class ToyService(Service[ToySettings]):
    name = "toy"

    def __init__(self, settings: ToySettings, bus: Bus) -> None:
        super().__init__(settings, bus)
        self._told: set[str] = set()
        self._http: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        tell("start")
        if self.settings.toy == "slow_start":
            await asyncio.Event().wait()
        if self.settings.toy == "bad_start":
            raise RuntimeError("this toy is broken")
        if self.settings.toy in ("fails", "sticks"):
            asyncio.get_running_loop().call_soon(self.fail, RuntimeError("the engine died"))
        if self.settings.http_port is not None:
            self._http = await asyncio.start_server(self._answer, "127.0.0.1", self.settings.http_port)
        return self

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            self._http.close()
        tell("close")
        if self.settings.toy == "sticks":
            threading.Event().wait()

    def load(self) -> Load:
        return Load(running=1)

    def card(self, card: Card) -> Card:
        if card.state not in self._told:
            self._told.add(card.state)
            tell(f"card {card.state}")
        url = f"http://127.0.0.1:{self._http.sockets[0].getsockname()[1]}" if self._http is not None else ""
        return replace(card, detail="playing", url=url)

    async def stop_intake(self) -> None:
        tell("stop_intake")

    async def drain(self, deadline: Deadline) -> None:
        tell("drain")
        if self.settings.toy == "slow_drain":
            await asyncio.Event().wait()


def tell(step: str) -> None:
    print(f"toy: {step}", flush=True)


if __name__ == "__main__":
    sys.exit(run(ToyService, ToySettings))
