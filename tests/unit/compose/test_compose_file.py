"""docker-compose.yml, without an engine: complete, scale-safe, closed to the outside, and true to the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdbus.grants import GRANTS
from pdbus.stack.cli import parser
from pdbus.stack.nats_server import COLLECTOR
from pdbus.stack.plan import STOP_ORDER

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if "build" in service}
KINDS = {kind for group in STOP_ORDER for kind in group}


def test_every_kind_of_service_runs_beside_nats_and_jaeger() -> None:
    modules = {service["command"][-1].removeprefix("pdbus.") for service in OURS.values()}
    assert modules == KINDS
    assert COMPOSE["services"].keys() - OURS.keys() == {"nats", "jaeger", "keys"}


@pytest.mark.parametrize("name", OURS)
def test_each_has_the_key_of_its_own_kind_and_no_other_to_read_only(name: str) -> None:
    service, kind = OURS[name], OURS[name]["command"][-1].removeprefix("pdbus.")
    assert kind in GRANTS
    mounted = [volume for volume in service["volumes"] if "keys" in volume]
    assert mounted == [f"./deploy/keys/{kind}.nk:{service['environment']['PDBUS_NATS_SEED']}:ro"]


def test_nats_asks_for_keys_and_has_none_itself() -> None:
    assert 'include "accounts.conf"' in (ROOT / "deploy" / "nats.conf").read_text()
    mounted = [volume for volume in COMPOSE["services"]["nats"]["volumes"] if "keys" in volume]
    assert mounted == ["./deploy/keys/accounts.conf:/etc/nats/accounts.conf:ro"]


def test_nats_collects_as_seldom_as_the_embedded_one() -> None:
    assert COMPOSE["services"]["nats"]["environment"] == COLLECTOR


def test_keys_are_made_by_a_command_that_exists_and_do_not_get_into_the_image_or_the_repository() -> None:
    keys = COMPOSE["services"]["keys"]
    assert parser().parse_args(keys["command"][1:]).folder == Path("/keys")
    assert keys["volumes"] == ["./deploy/keys:/keys"]
    assert keys["profiles"], "not started by `docker compose up`"
    assert (ROOT / "deploy" / "keys" / ".gitignore").read_text().split()[-2:] == ["*", "!.gitignore"]


@pytest.mark.parametrize("name", OURS)
def test_a_service_is_one_process_of_the_one_image(name: str) -> None:
    service = OURS[name]
    python, dash_m, module = service["command"]
    assert (python, dash_m) == ("python", "-m")
    assert importlib.util.find_spec(f"{module}.__main__") is not None
    assert service["build"]["context"] == "."
    assert len({each["image"] for each in OURS.values()}) == 1
    assert service["depends_on"]["nats"] == {"condition": "service_healthy"}
    assert service["environment"]["NATS_URL"] == "nats://nats:4222"


@pytest.mark.parametrize("name", OURS)
def test_its_health_check_is_a_command_that_exists_and_asks_for_its_own_kind(name: str) -> None:
    service = OURS[name]
    cmd, program, *arguments = service["healthcheck"]["test"]
    assert (cmd, program) == ("CMD", "pdbus")
    given = parser().parse_args(arguments)
    assert f"pdbus.{given.service}" == service["command"][-1]


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_any_service_can_be_scaled_but_those_with_a_port(name: str) -> None:
    service = COMPOSE["services"][name]
    assert "container_name" not in service
    assert "PDBUS_ID" not in service.get("environment", {})
    assert ("ports" in service) == (name in {"router", "jaeger"})
    for port in service.get("ports", ()):
        assert str(port).startswith("127.0.0.1:"), "nothing is published beyond this machine"


@pytest.mark.parametrize("name", OURS)
def test_there_is_time_to_drain_before_the_kill(name: str) -> None:
    assert int(OURS[name]["stop_grace_period"].removesuffix("s")) >= 20


def test_images_are_pinned() -> None:
    for service in COMPOSE["services"].values():
        name, _, tag = service["image"].rpartition(":")
        assert name
        assert tag[0].isdigit()


def test_volumes_are_declared() -> None:
    used = {
        volume.split(":")[0]
        for service in COMPOSE["services"].values()
        for volume in service.get("volumes", ())
        if not volume.startswith(".")
    }
    assert used == COMPOSE["volumes"].keys()


def test_what_the_image_needs_is_not_ignored_and_exists() -> None:
    wanted = {line.split()[1] for line in _dockerfile() if line.startswith("COPY") and "--from" not in line}
    wanted |= {word for line in _dockerfile() if line.startswith("COPY pyproject") for word in line.split()[1:-1]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert wanted <= allowed
    assert all((ROOT / path).exists() for path in wanted)


def test_the_image_runs_without_root() -> None:
    lines = _dockerfile()
    assert any(line.startswith("USER ") for line in lines[lines.index("FROM ${PYTHON_IMAGE}") :])


def _dockerfile() -> list[str]:
    return (ROOT / "Dockerfile").read_text().splitlines()
