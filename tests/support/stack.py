"""A real stack for tests: `pdbus up` as a user starts it, on free ports and a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FP32 = {"PDBUS_PRECISION": "fp32", "PDBUS_KV_DTYPE": "fp32"}
"""The environment of a stack that is held against the reference."""

READY_S = 90.0
"""Far above the promised 20 s: a test machine may be busy. The promise has a test of its own."""


@dataclass(frozen=True)
class Stack:
    process: subprocess.Popen[bytes]
    data: Path
    output: Path
    ready_s: float

    @property
    def run(self) -> dict[str, Any]:
        """What the launcher wrote into its run file."""
        return json.loads((self.data / "run.json").read_text())

    @property
    def url(self) -> str:
        return str(self.run["url"])

    @property
    def nats_url(self) -> str:
        return str(self.run["nats_url"])

    @property
    def model(self) -> str:
        return str(self.run["model"])

    def pids(self) -> dict[str, int]:
        """Process ids by service id, NATS among them."""
        return {name: int(pid) for name, pid in self.run["pids"].items()}

    def stop(self, timeout_s: float = 40.0) -> int:
        """Ctrl-C, as a user would; kills what does not end in time, which a test then sees by the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(10)


@contextmanager
def running_stack(data: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """Yields once every service is ready. Raises AssertionError with the launcher's output if that never comes."""
    data.mkdir(parents=True, exist_ok=True)
    output = data / "up.txt"
    argv = [sys.executable, "-m", "pdbus.stack", "up", "--port", "0", "--data", str(data), *options]
    start = time.monotonic()
    with output.open("wb") as sink:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )
    stack = Stack(process, data, output, 0.0)
    try:
        while not _ready(data):
            assert process.poll() is None, f"pdbus up ended with {process.returncode}:\n{output.read_text()}"
            assert time.monotonic() - start < READY_S, f"pdbus up is not ready:\n{output.read_text()}"
            time.sleep(0.05)
        yield Stack(process, data, output, time.monotonic() - start)
    finally:
        stack.stop()


def _ready(data: Path) -> bool:
    try:
        return bool(json.loads((data / "run.json").read_text()).get("ready"))
    except (OSError, ValueError):
        return False
