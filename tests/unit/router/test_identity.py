"""API keys: known by their hash alone, from the file as it is now, and never repeated to anybody."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from pdbus import keyfile
from pdbus.errors import Conflict, InvalidRequest, NotFound, Unauthorized
from pdbus.router.identity import LOOK_AGAIN_S, OPEN, Identities


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def touch(path: Path) -> None:
    """A file that was changed within the clock's grain looks the same."""
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def test_without_a_file_everybody_is_the_same_tenant_whatever_is_sent() -> None:
    identities = Identities()
    assert identities.of(None) is identities.of("sk-none") is OPEN
    assert not identities.wanted


def test_a_key_proves_its_tenant_and_carries_its_limits(path: Path) -> None:
    acme = keyfile.add(path, "acme", requests_per_minute=5, tokens_per_minute=7, max_inflight=2, priority=3)
    other = keyfile.add(path, "other")
    identities = Identities(path)
    found = identities.of(acme.text)
    assert (found.tenant, found.priority_most, found.key_id) == ("acme", 3, acme.entry.id)
    quota = found.quota
    assert (quota.requests_per_minute, quota.tokens_per_minute, quota.max_inflight) == (5, 7, 2)
    assert identities.of(other.text).tenant == "other"


def test_no_other_text_is_a_key(path: Path) -> None:
    text = keyfile.add(path, "acme").text
    mixed = keyfile.add(path, "other").text
    identities = Identities(path)
    wrong = [None, "", " ", text[:-1], text + "x", text.upper(), text[:17] + mixed[17:], "pdk-", "\0", "ä" * 60]
    wrong += [text[:-1] + ("a" if text[-1] != "a" else "b"), "\udcff" * 60, "pdk-" + "0" * 12 + "-" + "A" * 43]
    for token in wrong:
        with pytest.raises(Unauthorized) as refused:
            identities.of(token)
        assert not token or token == " " or token not in refused.value.message


def test_the_file_holds_no_key_and_only_its_owner_reads_it(path: Path) -> None:
    made = keyfile.add(path, "acme")
    secret = made.text.rpartition("-")[2] if made.text.count("-") == 2 else made.text[17:]
    assert secret not in path.read_text()
    assert made.text not in repr(made.entry)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert re.fullmatch(r"[0-9a-f]{64}", json.loads(path.read_text())["keys"][0]["sha256"])


def test_a_revoked_key_is_worthless_within_a_second_and_a_new_one_is_known(path: Path, clock: Clock) -> None:
    first, second = keyfile.add(path, "acme"), keyfile.add(path, "acme")
    identities = Identities(path, clock)
    keyfile.revoke(path, first.entry.id)
    third = keyfile.add(path, "third")
    touch(path)
    clock.now += LOOK_AGAIN_S
    with pytest.raises(Unauthorized):
        identities.of(first.text)
    assert identities.of(second.text).tenant == "acme"
    assert identities.of(third.text).tenant == "third"


def test_a_file_that_breaks_changes_nothing_and_one_that_goes_lets_nobody_in(path: Path, clock: Clock) -> None:
    key = keyfile.add(path, "acme")
    whole = path.read_text()
    identities = Identities(path, clock)
    path.write_text(whole[:50])
    clock.now += LOOK_AGAIN_S
    assert identities.of(key.text).tenant == "acme"
    path.unlink()
    clock.now += LOOK_AGAIN_S
    with pytest.raises(Unauthorized):
        identities.of(key.text)
    path.write_text(whole)
    clock.now += LOOK_AGAIN_S
    assert identities.of(key.text).tenant == "acme"


@pytest.mark.parametrize(
    "content", ["", "{}", '{"secret": "x"}', '{"secret": "00", "keys": []}', "[1", "null", "[" * 100_000]
)
def test_a_router_does_not_start_open_where_its_file_is_missing_or_broken(path: Path, content: str) -> None:
    if content:
        path.write_text(content)
    with pytest.raises(InvalidRequest, match="keys file"):
        Identities(path)


@pytest.mark.parametrize(
    "change",
    [
        {"requests_per_minute": 0},
        {"tokens_per_minute": -1},
        {"max_inflight": 10**400},
        {"priority": 10},
        {"sha256": "é" * 64},
        {"tenant": ""},
        {"tenant": "acme\n"},
    ],
)
def test_a_key_that_could_not_be_served_makes_the_file_a_broken_one(path: Path, change: dict[str, Any]) -> None:
    keyfile.add(path, "acme")
    whole = json.loads(path.read_text())
    whole["keys"][0] |= change
    path.write_text(json.dumps(whole))
    with pytest.raises(InvalidRequest, match="keys file"):
        Identities(path)


def test_all_keys_revoked_is_not_the_same_as_no_file(path: Path) -> None:
    keyfile.revoke(path, keyfile.add(path, "acme").entry.id)
    with pytest.raises(Unauthorized):
        Identities(path).of("sk-none")


def test_a_salt_is_the_tenants_and_the_installations(tmp_path: Path) -> None:
    """Who knows the tenant's name can't make it: that takes the file."""
    salts = []
    for name in ("a", "b"):
        keyfile.add(tmp_path / name, "acme")
        identities = Identities(tmp_path / name)
        salts += [identities.salt("acme"), identities.salt("other")]
        assert identities.salt("acme") == Identities(tmp_path / name).salt("acme"), "the same in every router"
    assert len({*salts, Identities().salt("acme"), Identities().salt("other")}) == 6


def test_the_secret_outlives_the_keys(path: Path) -> None:
    first = keyfile.add(path, "acme")
    before = keyfile.read(path).secret
    keyfile.revoke(path, first.entry.id)
    keyfile.add(path, "acme")
    assert keyfile.read(path).secret == before


@pytest.mark.parametrize("tenant", ["", "anonymous", "a b", "x" * 65, "a/b", "ä", "a\n"])
def test_names_that_could_be_mistaken_are_refused(path: Path, tenant: str) -> None:
    with pytest.raises(InvalidRequest):
        keyfile.add(path, tenant)
    assert not path.exists()


def test_what_is_not_there_can_not_be_revoked(path: Path) -> None:
    keyfile.add(path, "acme")
    with pytest.raises(NotFound):
        keyfile.revoke(path, "000000000000")


def test_two_changes_at_once_do_not_lose_one(path: Path) -> None:
    import fcntl

    keyfile.add(path, "acme")
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Conflict):
            keyfile.add(path, "other")
