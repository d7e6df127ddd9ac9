"""Processes of a stack, killed, stopped, cut off and restarted, one at a time: the next when that is back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from loadtest.proxied import tell
from loadtest.stack import Stack
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.errors import PdbusError

KINDS = ("router", "prefill", "decode", "param-server", "cache", "invalidator", "nats")
KILLED, STOPPED, STOPPED_FOR_GOOD, CUT, ENDED = "kill -9", "SIGSTOP", "SIGSTOP, kill -9", "cut off", "SIGTERM"
WAYS = (KILLED, KILLED, STOPPED, STOPPED_FOR_GOOD, CUT, ENDED)
_AWAY_S = (0.3, 6.0)
"""How long a process is stopped or cut off: shorter and longer than it takes to be given up."""
_BACK_S = 120.0
_BUS_S = 5.0


@dataclass
class Strike:
    """Monotonic seconds; `back_s`: when all was ready again; None: never."""

    way: str
    process: str
    at_s: float
    back_s: float | None = None

    @property
    def kind(self) -> str:
        return self.process if self.process == "nats" else self.process.rsplit("-", 1)[0]

    @property
    def until_s(self) -> float:
        return self.back_s or self.at_s + _BACK_S


@dataclass
class Strikes:
    """`nats_pid`: of the server now; `proxy`: what all but the fleet's own connection goes through."""

    stack: Stack
    fleet: Fleet
    nats_pid: Callable[[], int]
    proxy: subprocess.Popen[str]
    rng: random.Random
    all: list[Strike] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    """How often a process was made to end, by id."""
    _turn: list[str] = field(default_factory=list)
    _ways: dict[str, list[str]] = field(default_factory=dict)
    """That are left, by kind: each has had all of them before one comes again."""

    async def next(self, every_s: float, over: Callable[[], None] = lambda: None) -> None:
        """Strikes whoever's turn it is; returns when that is over, which is told, and `every_s` have passed."""
        began_s = time.monotonic()
        self._turn = self._turn or self.rng.sample(KINDS, len(KINDS))
        kind = self._turn.pop()
        self._ways[kind] = self._ways.get(kind) or self.rng.sample(WAYS, len(WAYS))
        await self.strike(kind, self._ways[kind].pop())
        over()
        await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began_s)))

    async def strike(self, kind: str, way: str) -> None:
        """Returns when the process, and with NATS every process, is ready again. A NATS server is not cut off: it is
        stopped."""
        if kind == "nats":
            name, pid, way = "nats", self.nats_pid(), STOPPED if way == CUT else way
        else:
            name, pid = self.rng.choice(sorted(self.stack.pids(kind).items()))
        before = {card.id: card.incarnation for card in self.fleet.cards()}
        struck = Strike(way, name, time.monotonic())
        self.all.append(struck)
        if way not in (STOPPED, CUT):
            self.ended[name] += 1
        with contextlib.suppress(ProcessLookupError):
            await self._do(way, name, pid)
        await self._comes_back(struck, before if way in (KILLED, ENDED, STOPPED_FOR_GOOD) else {})

    async def _do(self, way: str, name: str, pid: int) -> None:
        away_s = self.rng.uniform(*_AWAY_S)
        if way == KILLED:
            os.kill(pid, signal.SIGKILL)
        elif way == ENDED:
            os.kill(pid, signal.SIGTERM)
        elif way == CUT:
            tell(self.proxy, f"cut {name}")
            try:
                await asyncio.sleep(away_s)
            finally:
                tell(self.proxy, f"mend {name}")
        else:
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(away_s)
            finally:
                os.kill(pid, signal.SIGCONT if way == STOPPED else signal.SIGKILL)

    async def _comes_back(self, struck: Strike, before: dict[str, str]) -> None:
        """`before`: incarnations that have ended; none where the process goes on."""
        if struck.process == "nats":
            await asyncio.sleep(_BUS_S)  # cards of the time before are no sign
        ids = set(before) - {"nats"} if struck.process == "nats" else {struck.process}

        def back(fleet: Fleet) -> bool:
            cards = {card.id: card for card in fleet.cards() if fleet.state(card.id) == "live"}
            old = before.get(struck.process)
            new = struck.process == "nats" or (cards.get(struck.process) or _NOBODY).incarnation != old
            return new and all(id in cards and cards[id].state == "ready" for id in ids)

        with contextlib.suppress(PdbusError):
            await self.fleet.wait_for(back, Deadline.after(_BACK_S))
            struck.back_s = time.monotonic()


class _Nobody:
    incarnation = None


_NOBODY = _Nobody()
