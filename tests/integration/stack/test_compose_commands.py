"""Every service of docker-compose.yml: started by exactly its command, healthy by its check, ended by SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.stack.conftest import wait_until
from tests.support.checkpoints import tiny_checkpoint

COMPOSE: dict[str, Any] = yaml.safe_load((Path(__file__).parents[3] / "docker-compose.yml").read_text())
SERVICES = {name: service for name, service in COMPOSE["services"].items() if "build" in service}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


def _environment(service: dict[str, Any], here: dict[str, str]) -> dict[str, str]:
    """The service's own variables; those that only mean something among the containers are replaced by `here`."""
    declared = {name: re.sub(r"\$\{\w+:-(\w*)\}", r"\1", str(value)) for name, value in service["environment"].items()}
    image = {"PDBUS_LOG_FORMAT": "json", "PDBUS_DATA": here["PDBUS_DATA"], "OMP_NUM_THREADS": "1"}
    return {**os.environ, **image, **declared, **{name: value for name, value in here.items() if name in declared}}


def _program(words: list[str]) -> list[str]:
    """`python` and `pdbus` as the image's PATH finds them: those of this environment."""
    return [sys.executable if words[0] == "python" else str(Path(sys.executable).with_name(words[0])), *words[1:]]


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    environment: dict[str, str]
    log: Path
    service: dict[str, Any]

    def healthy(self) -> bool:
        check = _program(self.service["healthcheck"]["test"][1:])
        return subprocess.run(check, env=self.environment, capture_output=True, check=False).returncode == 0

    def healthy_or_dead(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.healthy()


@pytest.fixture
def running(
    nats_url: str, unique: Callable[[str], str], checkpoint: Path, tmp_path: Path
) -> Iterator[dict[str, Running]]:
    started: dict[str, Running] = {}
    here = {
        "NATS_URL": nats_url, "PDBUS_MODEL": unique("compose"), "OTEL_EXPORTER_OTLP_ENDPOINT": "",
        "PDBUS_CHECKPOINT": str(checkpoint), "PDBUS_SLOTS": str(tmp_path / "slots"),
        "PDBUS_HTTP_HOST": "127.0.0.1", "PDBUS_HTTP_PORT": "0",
    }  # fmt: skip
    for name, service in SERVICES.items():
        environment = _environment(service, {**here, "PDBUS_DATA": str(tmp_path / name)})
        log = tmp_path / f"{name}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(_program(service["command"]), env=environment, stdout=sink, stderr=sink)
        started[name] = Running(process, environment, log, service)
    yield started
    for each in started.values():
        each.process.kill()
        each.process.wait()


def test_all_become_healthy_and_end_on_sigterm_within_their_time(running: dict[str, Running]) -> None:
    for name, each in running.items():
        wait_until(each.healthy_or_dead, f"{name} is healthy", within_s=60)
    for each in running.values():
        each.process.send_signal(signal.SIGTERM)
    for each in running.values():
        grace_s = int(each.service["stop_grace_period"].removesuffix("s"))
        assert each.process.wait(grace_s) == 0, each.log.read_text()
    assert not running["router"].healthy()
