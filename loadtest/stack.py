"""A stack for a measurement or a test: `pdbus up` as a user starts it, on free ports, ended with the scope."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from loadtest.memory import peak_bytes

APART = ("--prefill", "1")
"""Prefill and decode in processes of their own, on whatever machine."""
_READY_S = 180.0
"""Far above the promised 20 s: the machine may be busy, and the promise has a test of its own."""
_END_S = 40.0
_LOOK_S = 0.05
_TOLD = 3


class Refused(Exception):
    """`pdbus up` did not start; the message is what it said last, and a note all of it."""


@dataclass(frozen=True)
class Stack:
    """A running stack. Its launcher writes what it says into `output`."""

    process: subprocess.Popen[bytes]
    data: Path
    output: Path
    started_s: float
    """On the monotonic clock."""

    @classmethod
    def start(cls, data: Path, options: Sequence[str], env: Mapping[str, str] | None) -> Self:
        """Not ready yet: see `look`."""
        data.mkdir(parents=True, exist_ok=True)
        output = data / "up.txt"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "pdbus.stack", "up", "--port", "0", "--data", str(data), *options],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
        return cls(process, data, output, time.monotonic())

    def look(self) -> bool:
        """Whether every service is ready. Raises Refused where that will not come any more, or not in time."""
        try:
            if json.loads((self.data / "run.json").read_text()).get("ready"):
                return True
        except (OSError, ValueError):
            pass  # it isn't written yet
        if self.process.poll() is not None:
            raise self._refused(f"it ended with {self.process.returncode}")
        if time.monotonic() - self.started_s > _READY_S:
            raise self._refused(f"it was not ready within {_READY_S:g} s")
        return False

    def stop(self) -> int:
        """Ctrl-C, as a user would; kills what does not end in time, which is then to be seen by the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    @property
    def run(self) -> dict[str, Any]:
        """What the launcher tells of it in its run file."""
        found: dict[str, Any] = json.loads((self.data / "run.json").read_text())
        return found

    @property
    def url(self) -> str:
        return str(self.run["url"])

    @property
    def nats_url(self) -> str:
        return str(self.run["nats_url"])

    @property
    def model(self) -> str:
        return str(self.run["model"])

    def pids(self, service: str = "") -> dict[str, int]:
        """Process ids by service id, NATS among them; of one kind or of all."""
        return {name: int(pid) for name, pid in self.run["pids"].items() if name.startswith(service)}

    def peaks(self) -> dict[str, int]:
        """Bytes that each process had resident at most."""
        return {name: peak_bytes(pid) for name, pid in self.pids().items()}

    async def restart(self, *services: str) -> None:
        """Ends the processes of these kinds as SIGTERM does, and waits until the launcher has brought up others.

        Raises Refused where they don't come back in time."""
        before = {name: pid for service in services for name, pid in self.pids(service).items()}
        for pid in before.values():
            os.kill(pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(_READY_S):
                while any(self.pids().get(name) == pid for name, pid in before.items()):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise Refused(f"{', '.join(before)} did not start again") from None

    def _refused(self, otherwise: str) -> Refused:
        said = self.output.read_text(errors="replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        error = Refused(" / ".join(lines[-_TOLD:]) or otherwise)
        error.add_note(f"pdbus up: {otherwise}\n{said}")
        return error


@contextmanager
def running_stack(data: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """Yields once every service is ready. Raises Refused if that never comes. `data` stays."""
    stack = Stack.start(data, options, env)
    try:
        while not stack.look():
            time.sleep(_LOOK_S)
        yield stack
    finally:
        stack.stop()


@asynccontextmanager
async def stack_in(data: Path, *options: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Stack]:
    """As `running_stack`, for an event loop."""
    running = Stack.start(data, options, env)
    try:
        while not running.look():  # noqa: ASYNC110 - a process tells of itself by a file
            await asyncio.sleep(_LOOK_S)
        yield running
    finally:
        await asyncio.to_thread(running.stop)


@asynccontextmanager
async def stack(*options: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Stack]:
    """As `stack_in`, in a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix="pdbus-load-", ignore_cleanup_errors=True) as folder:
        async with stack_in(Path(folder), *options, env=env) as running:
            yield running
