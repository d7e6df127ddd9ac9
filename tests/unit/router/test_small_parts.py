"""Cache-Control, idempotency keys, error bodies, settings, and what the router never imports."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from loadtest.simulated_version import END_OF_TURN, meta_files
from pdbus import errors
from pdbus.context import Deadline
from pdbus.errors import Conflict, DeadlineExceeded, InvalidRequest, PdbusError
from pdbus.router.cache_control import CacheControl
from pdbus.router.http_errors import describe, headers_of
from pdbus.router.idempotency import IdempotencyTable, seed_of
from pdbus.router.settings import RouterSettings
from pdbus.router.version import Version, build_version
from pdbus.settings import SettingsError, load


@pytest.mark.parametrize(
    ("header", "meant"),
    [
        ("", CacheControl()),
        ("no-store", CacheControl(read=False, store=False)),
        ("no-cache", CacheControl(read=False)),
        ("max-age=60", CacheControl(max_age_s=60)),
        ("Max-Age=0, No-Cache", CacheControl(read=False, max_age_s=0)),
        ("max-age=x", CacheControl(max_age_s=0)),
        ("something=else", CacheControl()),
    ],
)
def test_cache_control(header: str, meant: CacheControl):
    assert CacheControl.parse(header) == meant


async def test_one_at_a_time_under_an_idempotency_key():
    table, inside = IdempotencyTable(), []

    async def use(number: int) -> None:
        async with table.hold("t", "k", b"body", Deadline.after(30)):
            inside.append(number)
            assert len(inside) == 1
            await asyncio.sleep(0)
            inside.clear()

    await asyncio.gather(*(use(number) for number in range(4)))


async def test_an_idempotency_key_belongs_to_one_request_of_one_tenant():
    table = IdempotencyTable()
    async with table.hold("t", "k", b"one", Deadline.after(30)):
        pass
    with pytest.raises(Conflict):
        async with table.hold("t", "k", b"other", Deadline.after(30)):
            pass
    async with table.hold("u", "k", b"other", Deadline.after(30)):
        pass


async def test_the_wait_for_the_same_request_ends_with_the_deadline():
    table = IdempotencyTable()
    async with table.hold("t", "k", b"b", Deadline.after(30)):
        with pytest.raises(DeadlineExceeded):
            async with table.hold("t", "k", b"b", Deadline.after(0.01)):
                pass
    async with table.hold("t", "k", b"b", Deadline.after(30)):
        pass


@pytest.mark.parametrize("key", ["", "k" * 256])
async def test_an_unusable_idempotency_key(key: str):
    with pytest.raises(InvalidRequest):
        async with IdempotencyTable().hold("t", key, b"b", Deadline.after(30)):
            pass


def test_the_seed_of_a_key_is_the_same_in_every_router():
    assert seed_of("t", "k") == seed_of("t", "k") != seed_of("u", "k")
    assert 0 <= seed_of("t", "k") < 2**64


def _all_errors(cls: type[PdbusError] = PdbusError) -> list[type[PdbusError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _all_errors(child))]


@pytest.mark.parametrize("cls", _all_errors())
def test_every_error_has_a_status_and_a_body(cls: type[PdbusError]):
    status, body = describe(cls("what happened", param="field"))
    assert 400 <= status < 600
    assert (body.error.message, body.error.param) == ("what happened", "field")
    assert body.error.type
    assert body.error.code
    assert headers_of(cls("x"))["x-should-retry"] == ("true" if cls.retryable else "false")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidRequest("x"), 400),
        (errors.NotFound("x"), 404),
        (errors.Overloaded("x"), 429),
        (errors.Unavailable("x"), 503),
        (errors.DeadlineExceeded("x"), 504),
        (TimeoutError(), 504),
        (errors.RootGone("x"), 503),
    ],
)
def test_statuses(error: Exception, status: int):
    assert describe(error)[0] == status


def test_a_foreign_error_is_told_without_its_text():
    status, body = describe(RuntimeError("password=secret"))
    assert status == 500
    assert "secret" not in body.error.message


def test_when_to_try_again():
    assert headers_of(errors.Overloaded("x", retry_after_s=7.2))["Retry-After"] == "8", "not before"
    assert "Retry-After" not in headers_of(errors.InvalidRequest("x"))


def test_settings():
    settings = load(RouterSettings, {"PDBUS_HTTP_PORT": "0", "PDBUS_HTTP_HOST": "::1"})
    assert (settings.http_port, settings.http_host) == (0, "::1")
    with pytest.raises(SettingsError):
        load(RouterSettings, {"PDBUS_HTTP_PORT": "70000"})


@pytest.mark.parametrize("module", ["pdbus.router.service", "pdbus.client", "loadtest.simulated"])
def test_torch_is_never_imported(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("after_s", [float("nan"), float("inf"), -1.0, 1e9])
def test_a_peers_senseless_time_to_try_again_is_no_error_of_ours(after_s: float):
    error = errors.WireError("overloaded", "full", retry_after_s=after_s).to_exception()
    assert headers_of(error)["Retry-After"] == "1"


@pytest.mark.parametrize("eos", [[{}], [[1]], [True, "2", -3, 1 << 40], {"a": 1}, "x"])
def test_a_pushed_version_with_senseless_end_tokens_is_served_without_them(eos: object):
    files = meta_files() | {"generation_config.json": json.dumps({"eos_token_id": eos}).encode()}
    version = build_version(bytes(32), files, {})
    assert isinstance(version, Version)
    assert version.stop_ids == (END_OF_TURN,)
