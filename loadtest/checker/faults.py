"""Processes of a stack that are killed or stopped while it serves, and how soon each is back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass, field

from loadtest.stack import Stack
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.errors import PdbusError

SERVICES = ("param-server", "prefill", "decode", "cache", "invalidator")
_STOPPED_S = (0.3, 4.0)
_BACK_S = 90.0


@dataclass
class Fault:
    """`back_s`: until the process, or its successor, was ready again; None: never."""

    kind: str
    process: str
    at_s: float
    back_s: float | None = None


@dataclass
class ProcessFaults:
    """One at a time, drawn from `rng`; the next comes when the process of the last one is back."""

    stack: Stack
    fleet: Fleet
    rng: random.Random
    all: list[Fault] = field(default_factory=list)
    _coming: list[asyncio.Task[None]] = field(default_factory=list)

    async def run(self, every_s: float) -> None:
        """Until it is cancelled; what is stopped then is let go on."""
        turn = list(SERVICES)
        while True:
            began_s = time.monotonic()
            if not turn:
                turn = list(SERVICES)
            service = turn.pop(self.rng.randrange(len(turn)))
            await self.strike(service, self.rng.choice(["kill", "kill", "stop"]))
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began_s)))

    async def strike(self, service: str, kind: str) -> None:
        name, pid = self.rng.choice(sorted(self.stack.pids(service).items()))
        before = self.fleet.card(name)
        fault = Fault("kill -9" if kind == "kill" else "SIGSTOP", name, time.monotonic())
        self.all.append(fault)
        old = before.incarnation if before and kind == "kill" else ""
        try:
            with contextlib.suppress(ProcessLookupError):
                if kind == "kill":
                    os.kill(pid, signal.SIGKILL)
                else:
                    await self._stop(pid)
        finally:  # also where the run ends meanwhile: whoever was stopped has to come back
            coming = asyncio.create_task(self._comes_back(fault, old))
            self._coming.append(coming)
        await asyncio.shield(coming)

    async def back(self) -> None:
        """Returns when what was struck is back, or won't be."""
        await asyncio.gather(*self._coming)

    async def _comes_back(self, fault: Fault, old: str) -> None:
        """`old`: the incarnation that was killed."""

        def back(fleet: Fleet) -> bool:
            card = fleet.card(fault.process)
            if card is None or fleet.state(fault.process) != "live":
                return False
            return card.state == "ready" and card.incarnation != old

        with contextlib.suppress(PdbusError):
            await self.fleet.wait_for(back, Deadline.after(_BACK_S))
            fault.back_s = time.monotonic() - fault.at_s

    async def _stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self.rng.uniform(*_STOPPED_S))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
