"""A real stack of toy services: `pdbus up` in everything but the services."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 100.0


def wait_until(condition: Callable[[], Any], what: str, within_s: float = PATIENCE_S, every_s: float = 0.02) -> Any:
    """The first true result of `condition()`."""
    give_up = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < give_up, f"not within {within_s} s: {what}"
        time.sleep(every_s)
    return found


@dataclass
class ToyStack:
    process: subprocess.Popen[bytes]
    data: Path
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def run(self) -> dict[str, Any]:
        try:
            return json.loads((self.data / "run.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}

    def pids(self) -> dict[str, int]:
        return self.run["pids"]

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.text
            return bool(self.run.get("ready")) and self.run["launcher"] == self.process.pid  # not of a former life

        wait_until(ready, "the stack is ready")

    def log(self, id: str) -> list[str]:
        return (self.data / "logs" / f"{id}.log").read_text().splitlines()


@pytest.fixture
def toy_stack(tmp_path: Path) -> Iterator[Callable[..., ToyStack]]:
    """Starts toy stacks; whatever of them is left is killed at the end."""
    started: list[ToyStack] = []

    def start(*toys: str, **settings: str) -> ToyStack:
        data = tmp_path / "data"
        output = tmp_path / f"up-{len(started)}.txt"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.toy_stack", str(data), *toys],
                stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                env={**os.environ, "NATS_URL": "", **settings},
            )  # fmt: skip
        started.append(ToyStack(process, data, output))
        return started[-1]

    yield start
    for stack in started:
        if stack.process.poll() is None:
            stack.process.send_signal(signal.SIGTERM)
            try:
                stack.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                stack.process.kill()
                stack.process.wait()
