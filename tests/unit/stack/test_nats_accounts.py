"""Keys on NATS: made once, kept, told to nobody."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from pdbus.errors import InvalidRequest
from pdbus.grants import GRANTS, SOURCE
from pdbus.nats_access import NatsAccess, public_key, shown
from pdbus.stack.cli import main
from pdbus.stack.nats_accounts import ACCOUNTS, seed_path, write_accounts


def test_a_key_for_each_kind_and_none_of_them_in_the_servers_file(tmp_path: Path) -> None:
    users = write_accounts(tmp_path, ["shop"])
    assert set(users) == {*GRANTS, "client-shop"} - {SOURCE}
    text = (tmp_path / ACCOUNTS).read_text()
    for user in users:
        seed = seed_path(tmp_path, user).read_text().strip()
        assert seed.startswith("SU")
        assert seed not in text
        assert public_key(seed) in text
    assert len({seed_path(tmp_path, user).read_text() for user in users}) == len(users)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700, "only its owner gets at the seeds"


def test_run_again_it_keeps_what_is_there_and_forgets_who_was_deleted(tmp_path: Path) -> None:
    write_accounts(tmp_path, ["shop", "crm"])
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    gone = public_key(before["client-crm.nk"])
    seed_path(tmp_path, "client-crm").unlink()
    users = write_accounts(tmp_path, ["new"], "own.features")
    after = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {"client-new", "client-shop", SOURCE} <= set(users)
    assert "client-crm" not in users
    assert gone not in after[ACCOUNTS]
    assert "own.features" in after[ACCOUNTS]
    kept = before.keys() - {ACCOUNTS, "client-crm.nk"}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


@pytest.mark.parametrize("name", ["", "a b", "../x", "a.b", "x" * 65, '"'])
def test_a_name_that_could_mean_something_else_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest):
        write_accounts(tmp_path / "keys", [name])
    assert not (tmp_path / "keys").exists()


def test_what_is_no_seed_is_told_without_being_shown(tmp_path: Path) -> None:
    seed_path(tmp_path, "router").write_text("SUSECRET")
    with pytest.raises(InvalidRequest) as told:
        write_accounts(tmp_path)
    assert "SECRET" not in told.value.message


def test_a_credentials_file_has_an_inbox_of_its_own_too(tmp_path: Path) -> None:
    write_accounts(tmp_path)
    seed = seed_path(tmp_path, "client").read_text().strip()
    creds = tmp_path / "user.creds"
    creds.write_text(
        "-----BEGIN NATS USER JWT-----\na.b.c\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
    assert NatsAccess(creds=creds).inbox() == NatsAccess(seed=seed_path(tmp_path, "client")).inbox()


def test_passwords_in_addresses_are_not_shown() -> None:
    told = shown("nats://user:secret@a:4222, tls://token@b:4223")
    assert told == "a:4222, b:4223"


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ["--file", str(tmp_path / "keys.json")]
    assert main(["keys", "add", "acme", "--requests-per-minute", "7", *file]) == 0
    text = capsys.readouterr().out.strip()
    id = text.split("-")[1]
    assert main(["keys", "list", *file]) == 0
    listed = capsys.readouterr().out
    assert re.search(rf"{id} .* 7 +- +- +5 +acme", listed)
    assert text not in listed
    assert main(["keys", "revoke", id, *file]) == 0
    assert main(["keys", "revoke", id, *file]) == 1
    assert main(["keys", "add", "no good", *file]) == 1
    assert main(["keys", "list", "--file", str(tmp_path / "none")]) == 1
    assert main(["keys", "nats", str(tmp_path / "nats"), "--client", "shop"]) == 0
    assert "client-shop" in capsys.readouterr().out
