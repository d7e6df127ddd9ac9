"""Every command of the README runs, in its order, as a newcomer would type it.

Blocks are marked in the README where they can't run as they stand: `stack` starts the stack of this test, `jaeger`
needs a Docker engine for Jaeger (the stack of this test exports to a receiver instead), `dry` would start a second
stack, an engine or this test itself: each of its commands is checked to exist with those arguments, and runs elsewhere
in full.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from pdbus.native.build import cache_folder
from pdbus.stack.cli import parser
from tests.support.otlp import Receiver
from tests.support.stack import Stack, running_stack

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Block:
    mark: str
    """Empty: run it."""
    language: str
    text: str


def blocks() -> list[Block]:
    pattern = r"(?:<!-- readme: (\w+) -->\n)?```(\w+)\n(.*?)```"
    found = re.findall(pattern, (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return [Block(*parts) for parts in found]


RUN = [block for block in blocks() if block.language == "sh" and not block.mark]
DRY = [block for block in blocks() if block.mark in {"dry", "jaeger", "stack"}]


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory, traces: Receiver) -> Iterator[tuple[Stack, dict[str, str]]]:
    """A stack in the default data folder of a user of our own, and that user's environment."""
    home = tmp_path_factory.mktemp("home")
    (home / ".cache" / "pdbus").mkdir(parents=True)  # its kernels are compiled already: they take ten seconds
    cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / ".cache" / "pdbus" / "native").symlink_to(cache_folder(), target_is_directory=True)
    env = {"XDG_DATA_HOME": str(home), "HOME": str(home), "OTEL_EXPORTER_OTLP_ENDPOINT": traces.endpoint}
    with running_stack(home / "pdbus", env=env) as stack:
        yield stack, {**os.environ, **env, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("block", RUN, ids=[block.text.splitlines()[0][:60] for block in RUN])
def test_the_command_runs(newcomer: tuple[Stack, dict[str, str]], block: Block, tmp_path: Path) -> None:
    stack, env = newcomer
    # A fresh clone has its environment in .venv; this run may use another one.
    script = block.text.replace("http://127.0.0.1:8000", stack.url).replace(
        ".venv/bin/", f"{Path(sys.executable).parent}/"
    )
    done = subprocess.run(["sh", "-eu", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.strip()
    assert '"error"' not in done.stdout


def test_the_traced_request_is_traced(newcomer: tuple[Stack, dict[str, str]], traces: Receiver) -> None:
    [block] = [block for block in RUN if "traceparent" in block.text]
    stack, env = newcomer
    script = block.text.replace("http://127.0.0.1:8000", stack.url)
    subprocess.run(["sh", "-eu", "-c", script], cwd=ROOT, env=env, check=True, capture_output=True, timeout=200)
    spans = traces.trace("0af7651916cd43dd8448eb211c80319c", lambda spans: len(spans) > 3, timeout_s=60)
    assert len(spans) > 3


@pytest.mark.parametrize("line", [line for block in DRY for line in block.text.splitlines()])
def test_the_command_exists_with_these_arguments(line: str) -> None:
    words = shlex.split(line, comments=True)
    while "=" in words[0]:
        words = words[1:]
    match words:
        case ["make", *targets]:
            done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, timeout=100)
            assert done.returncode == 0, done.stderr
        case [program, *arguments] if program.endswith("/pdbus"):
            parser().parse_args(arguments)
        case [program, "-m", "loadtest", name, *arguments] if program.endswith("/python"):
            importlib.import_module(f"loadtest.{name}.command").arguments(arguments)
        case ["docker", "compose", "run", "--rm", "--user", _, service]:
            assert service in yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        case ["docker", "compose", "up", *arguments]:
            services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
            scaled = [argument.split("=")[0] for argument in arguments if "=" in argument]
            named = scaled + [
                argument for argument in arguments if "=" not in argument and not argument.startswith("-")
            ]
            assert set(named) <= services.keys()
        case _:
            pytest.fail(f"the README has a command that no test runs: {line}")
