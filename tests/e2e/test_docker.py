"""The stack in containers, with a real engine: `make test-docker`.

Needs the images that docker-compose.yml names, or a registry to pull them from. Jaeger is left out, since it takes no
part in serving.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.stack.conftest import wait_until

ROOT = Path(__file__).parents[2]
URL = "http://127.0.0.1:8000"
HEALTHZ = "http://127.0.0.1:8222/healthz"
# The NATS server's image may be one without wget.
PROBE = f"wget -q -O /dev/null {HEALTHZ} || python -c 'import urllib.request as r; r.urlopen(\"{HEALTHZ}\")'"
OVERRIDE = {
    "services": {
        "jaeger": {"profiles": ["absent"]},
        "nats": {"healthcheck": {"test": ["CMD-SHELL", PROBE]}},
    }
}

Compose = Callable[..., str]

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    override = tmp_path_factory.mktemp("compose") / "override.json"
    override.write_text(json.dumps(OVERRIDE))
    command = ["docker", "compose", "-p", "pdbus-test", "-f", str(ROOT / "docker-compose.yml"), "-f", str(override)]

    def run(*arguments: str) -> str:
        done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("build", "router")
    run("run", "--rm", "--user", f"{os.getuid()}:{os.getgid()}", "keys")
    yield run
    run("down", "--volumes", "--timeout", "25")


@pytest.fixture
def up(compose: Compose) -> None:
    compose("up", "--detach", "--no-build", "--scale", "decode=2", "--scale", "param-server=2")
    wait_until(_ready, "the router is ready", within_s=240)


def _ready() -> bool:
    try:
        with urllib.request.urlopen(f"{URL}/readyz", timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def _ask(question: str) -> str:
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 24,
    }
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def _container(compose: Compose, service: str) -> str:
    return compose("ps", "--quiet", service).split()[0]


@pytest.mark.usefixtures("up")
def test_it_answers_survives_a_kill_and_comes_back_with_its_weights(compose: Compose) -> None:
    assert "light" in _ask("What is photosynthesis?")
    subprocess.run(["docker", "kill", _container(compose, "decode")], check=True, capture_output=True)
    assert _ask("Name a colour.")

    compose("stop", "--timeout", "25")
    codes = compose("ps", "--all", "--format", "{{.Service}} {{.ExitCode}}").splitlines()
    assert {line for line in codes if not line.startswith(("nats ", "decode "))} == {
        "cache 0", "invalidator 0", "param-server 0", "prefill 0", "router 0",
    }  # fmt: skip

    compose("down")
    compose("up", "--detach", "--no-build")
    wait_until(_ready, "the router is ready again", within_s=240)
    assert "light" in _ask("What is photosynthesis?")
    members = json.loads(compose("exec", "-T", "router", "pdbus", "status", "--json"))["param_servers"]
    assert members == ["param-server-1", "param-server-2"], "new containers take up the places of the old ones"
