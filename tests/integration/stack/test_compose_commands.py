"""Every service of docker-compose.yml: started by its very command and key, healthy by its check, ended by SIGTERM."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import yaml

from pdbus import keyfile
from pdbus.client import Client, connect
from pdbus.errors import Unauthorized
from pdbus.permissions import streams
from tests.integration.stack.conftest import wait_until
from tests.support.checkpoints import tiny_checkpoint
from tests.support.secure import SecureNats, secure_nats

COMPOSE: dict[str, Any] = yaml.safe_load((Path(__file__).parents[3] / "docker-compose.yml").read_text())
SERVICES = {name: service for name, service in COMPOSE["services"].items() if "build" in service}
MODEL = "compose"
SECRET_PROMPT = "A prompt that is nobody's business but the caller's"


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


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def nats(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureNats]:
    """As deploy/nats.conf has it: who has no key is not let in."""
    async with secure_nats(tmp_path_factory.mktemp("nats"), ["shop"]) as made:
        yield made


@pytest.fixture(scope="module")
def api_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def api_key(api_keys: Path) -> str:
    return keyfile.add(api_keys, "acme").text


@pytest.fixture(scope="module")
def running(
    nats: SecureNats, api_keys: Path, api_key: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Running]]:
    started: dict[str, Running] = {}
    folder = tmp_path_factory.mktemp("running")
    for name, service in SERVICES.items():
        here = {
            "NATS_URL": nats.url, "PDBUS_MODEL": MODEL, "OTEL_EXPORTER_OTLP_ENDPOINT": "",
            "PDBUS_CHECKPOINT": str(checkpoint), "PDBUS_SLOTS": str(folder / "slots"),
            "PDBUS_HTTP_HOST": "127.0.0.1", "PDBUS_HTTP_PORT": "0", "PDBUS_DATA": str(folder / name),
            "PDBUS_NATS_SEED": str(_key(nats, service)),
        }  # fmt: skip
        environment = _environment(service, here) | {"PDBUS_KEYS_FILE": str(api_keys)}
        log = folder / f"{name}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(_program(service["command"]), env=environment, stdout=sink, stderr=sink)
        started[name] = Running(process, environment, log, service)
    for name, each in started.items():
        wait_until(each.healthy_or_dead, f"{name} is healthy", within_s=100, every_s=0.5)  # each is a process
    yield started
    for each in started.values():
        each.process.kill()
        each.process.wait()


def _key(nats: SecureNats, service: dict[str, Any]) -> Path:
    """The file that the service's container has as its key."""
    target = service["environment"]["PDBUS_NATS_SEED"]
    (source,) = [volume.split(":")[0] for volume in service["volumes"] if volume.split(":")[1] == target]
    return nats.keys / Path(source).name


async def test_they_serve_and_update_with_the_permissions_that_each_has(
    running: dict[str, Running], nats: SecureNats, api_key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Over the bus and in every service's own part: prompts, hand-over, caches, staging, commit, ref, deletes."""
    async with connect(nats.url, MODEL, access=nats.access("client-shop"), api_key=api_key) as caller:
        first = await caller.complete(SECRET_PROMPT, max_tokens=8, temperature=0)
        again = await caller.complete(SECRET_PROMPT, max_tokens=8, temperature=0)
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        async with caller.complete_stream(SECRET_PROMPT, max_tokens=8, temperature=0.5, seed=1) as chunks:
            assert [chunk async for chunk in chunks]
    async with connect(nats.url, MODEL, access=nats.access("client-shop")) as stranger:
        with pytest.raises(Unauthorized):
            await stranger.complete(SECRET_PROMPT, max_tokens=1)
    async with connect(nats.url, MODEL, access=nats.access("operator"), api_key=api_key) as operator:
        norm = np.full(64, 1.5, np.float32)
        async with operator.weights.begin(message="brighter") as update:
            await update.stage("model.norm.weight", norm)
            done = await update.commit()
        assert await operator.weights.wait_for_ref("stable", done.root, 60)
        async with asyncio.timeout(100):  # within 5 s of the entry routers admit by it
            while done.root.hex() not in await _served_by(operator):
                pass
        await operator.weights.rollback(now=True)
    assert "NATS refused" not in caplog.text


async def _served_by(client: Client) -> str:
    return str((await client.complete(SECRET_PROMPT, max_tokens=8, temperature=0))["system_fingerprint"])


def test_nothing_was_refused_to_any_of_them_and_no_secret_is_in_a_log(
    running: dict[str, Running], nats: SecureNats, api_key: str
) -> None:
    seeds = [path.read_text().strip() for path in nats.keys.glob("*.nk")]
    for name, each in running.items():
        told = each.log.read_text()
        refused = [line for line in told.splitlines() if "NATS refused" in line]
        # Who comes before the streams are there, and may not make them, asks once for each and then waits.
        assert [line for line in refused if "stream.create" not in line] == [], name
        assert len(refused) <= len(streams())
        for secret in (api_key, api_key[17:], SECRET_PROMPT, *seeds):
            assert secret not in told, f"{name} tells a secret"


def test_all_end_on_sigterm_within_their_time(running: dict[str, Running]) -> None:
    for each in running.values():
        each.process.send_signal(signal.SIGTERM)
    for each in running.values():
        grace_s = int(each.service["stop_grace_period"].removesuffix("s"))
        assert each.process.wait(grace_s) == 0, each.log.read_text()
    assert not running["router"].healthy()
