"""How soon one more worker serves beside a running stack, with the host's cache of weights and with an empty one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pdbus.bus.bus import connect
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline

_JOINS_S = 120.0
_ENDS_S = 20.0
_OF_ITS_OWN = ("PDBUS_LIFELINE_FD", "PDBUS_CORES_FILE")
"""What a worker of the stack inherits as open files."""


@dataclass(frozen=True)
class Joined:
    seconds: float
    """From the start of its process until its card says that it is ready."""
    cpu_s: float
    """Of the process in that time."""


async def join(data: Path, *, empty_cache: bool = False) -> Joined:
    """Starts one more decode worker beside the stack of the folder `data`, and ends it again.

    Raises DeadlineExceeded where it isn't ready in time."""
    run = json.loads((data / "run.json").read_text())
    with tempfile.TemporaryDirectory(prefix="pdbus-join-") as folder:
        env = _settings(run["pids"]["decode-1"]) | {"PDBUS_ID": "decode-joining", "PDBUS_DATA": f"{folder}/data"}
        if empty_cache:
            env["PDBUS_WEIGHT_CACHE"] = f"{folder}/weights"
        async with connect(run["nats_url"], name="loadtest join") as bus, Fleet(bus) as fleet:
            started = time.perf_counter()
            command = (sys.executable, "-m", "pdbus.decode")
            process = await asyncio.create_subprocess_exec(*command, env=env, stdin=asyncio.subprocess.DEVNULL)
            try:
                await fleet.wait_for(_is_ready, Deadline.after(_JOINS_S))
                return Joined(time.perf_counter() - started, _cpu_s(process.pid))
            finally:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), _ENDS_S)
                except TimeoutError:
                    process.kill()
                    await process.wait()


def _is_ready(fleet: Fleet) -> bool:
    card = fleet.card("decode-joining")
    return card is not None and card.state == "ready"


def _settings(pid: int) -> dict[str, str]:
    """The environment of one of the stack's workers."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    found = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return {name: value for name, value in found.items() if name not in _OF_ITS_OWN}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
