"""One supervised child process: started, restarted with backoff when it dies, stopped within a bound."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdbus.runtime.first import first
from pdbus.stack.logfiles import LogFile
from pdbus.stack.plan import ProcessPlan

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
STEADY_S = 60.0
"""A child that lived this long starts again without having its earlier deaths counted."""
_HURRY_S = 3.0
_BAD_SETTINGS = 2
"""Exit code of the runtime for settings that can't work: starting again would change nothing."""


@dataclass(frozen=True)
class Inherited:
    """File descriptors that every child keeps open."""

    lifeline: int
    """Read end of the launcher's lifeline."""
    lock: int
    """The data folder's lock."""
    cores: int | None = None
    """The ledger of cores (native/cores.py), where there is one."""

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(fd for fd in (self.lifeline, self.lock, self.cores) if fd is not None)

    @property
    def cores_file(self) -> str | None:
        """As a child opens the ledger."""
        return None if self.cores is None else f"/proc/self/fd/{self.cores}"


@dataclass
class Child:
    """Owned by the launcher's task that runs `keep_running`."""

    plan: ProcessPlan
    log: LogFile
    inherited: Inherited
    on_start: Callable[[Child], None]
    """It has a new pid."""
    on_death: Callable[[Child, str, float | None], None]
    """It ended unasked: how, and in how many seconds it starts again (None: it won't)."""
    settings: dict[str, str] = field(default_factory=dict)
    """Learned while running (the port that a router took); over the plan's."""
    process: asyncio.subprocess.Process | None = None
    deaths: int = 0
    """In a row; forgotten after a steady minute."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _log_start: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a process is being made, so that `stop` never misses one."""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    def last_lines(self) -> list[str]:
        """What this life of the child wrote last."""
        return self.log.tail(since_byte=self._log_start)

    async def keep_running(self) -> None:
        """Until `stop`, or a death that starting again can't mend."""
        while not self.stopping.is_set():
            started = time.monotonic()
            process = await self._start()
            if process is None:
                return
            code = await process.wait()
            if self.stopping.is_set():
                return
            self.deaths = 1 if time.monotonic() - started > STEADY_S else self.deaths + 1
            wait_s = None if code == _BAD_SETTINGS else backoff_s(self.deaths)
            self.on_death(self, how(code), wait_s)
            if wait_s is None:
                return
            await first(self.stopping.wait(), within_s=wait_s)

    async def stop(self, patience_s: float, hurry: asyncio.Event) -> bool:
        """SIGTERM, and SIGKILL after `patience_s`; `hurry` shortens that. True: it ended by itself."""
        self.stopping.set()
        async with self._turn:
            process = self.process
        if process is None or process.returncode is not None:
            return True
        process.send_signal(signal.SIGTERM)
        await first(process.wait(), hurry.wait(), within_s=patience_s)
        if hurry.is_set() and process.returncode is None:
            process.send_signal(signal.SIGTERM)  # the second one tells the runtime not to wait for running work
            await first(process.wait(), within_s=_HURRY_S)
        if process.returncode is not None:
            return True
        process.kill()
        await process.wait()
        return False

    async def _start(self) -> asyncio.subprocess.Process | None:
        async with self._turn:
            if self.stopping.is_set():
                return None
            self.process = await self._spawn()
        self.on_start(self)
        return self.process

    async def _spawn(self) -> asyncio.subprocess.Process:
        self._log_start = self.log.size
        output = self.log.open()
        try:
            return await asyncio.create_subprocess_exec(
                *self.plan.command,
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    **self.plan.settings,
                    **self.settings,
                    "PDBUS_LIFELINE_FD": str(self.inherited.lifeline),
                },
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=self.inherited.fds,
                # Its own session: Ctrl-C reaches the launcher alone, which stops its children in order.
                start_new_session=True,
            )
        finally:
            os.close(output)


def backoff_s(deaths: int) -> float:
    """Exponential in the number of deaths in a row, with ±20 % of jitter."""
    longest: float = min(_FIRST_BACKOFF_S * 2 ** min(deaths - 1, 16), _LONGEST_BACKOFF_S)
    return longest * random.uniform(0.8, 1.2)  # noqa: S311 - jitter, not a secret


def how(code: int) -> str:
    """How a process ended, for people."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
