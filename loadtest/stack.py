"""A stack of its own for a measurement: `pdbus up` on free ports and a temporary folder, ended with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.memory import peak_bytes

_READY_S = 180.0
_END_S = 40.0
_LOOK_S = 0.1
_TOLD = 3


class Refused(Exception):
    """`pdbus up` did not start; the message is what it said last."""


@dataclass(frozen=True)
class Stack:
    """A running stack."""

    data: Path

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
        """Process ids by service id, of one kind or of all."""
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


@asynccontextmanager
async def stack(*options: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Stack]:
    """Yields once every service is ready. Raises Refused with the launcher's words if that never comes."""
    with tempfile.TemporaryDirectory(prefix="pdbus-load-", ignore_cleanup_errors=True) as folder:
        data = Path(folder)
        with (data / "up.txt").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pdbus.stack", "up", "--port", "0", "--data", folder, *options),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
        try:
            await _ready(process, data)
            yield Stack(data)
        finally:
            await _end(process)


async def _ready(process: asyncio.subprocess.Process, data: Path) -> None:
    try:
        async with asyncio.timeout(_READY_S):
            while not _is_ready(data):
                if process.returncode is not None:
                    raise Refused(_last_words(data, f"it ended with {process.returncode}"))
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise Refused(_last_words(data, f"it was not ready within {_READY_S:g} s")) from None


def _is_ready(data: Path) -> bool:
    try:
        return bool(json.loads((data / "run.json").read_text()).get("ready"))
    except (OSError, ValueError):
        return False


def _last_words(data: Path, otherwise: str) -> str:
    lines = [line.strip() for line in (data / "up.txt").read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_TOLD:]) or otherwise


async def _end(process: asyncio.subprocess.Process) -> None:
    """As Ctrl-C does; kills what does not end in time."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await process.wait()
    if process.returncode is None:
        process.kill()
    await process.wait()
