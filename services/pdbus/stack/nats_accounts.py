"""NATS users with a key each, and the configuration that says what they may do: `pdbus keys nats DIR`.

DIR/accounts.conf   for the server, to be included by its configuration. Public keys and permissions: no secrets
DIR/KIND.nk         the seed of a kind of service
DIR/client-NAME.nk  the seed of one caller

Run again, it keeps every key that is there and writes the configuration anew. A user whose file was deleted is locked
out as soon as the server has read that again (`nats-server --signal reload`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

from pdbus.errors import InvalidRequest
from pdbus.grants import GRANTS, SOURCE
from pdbus.nats_access import inbox_of, public_key
from pdbus.permissions import Permissions, permissions

ACCOUNTS = "accounts.conf"
CLIENT = "client"
_CALLER = re.compile(r"[A-Za-z0-9_-]{1,64}")


def seed_path(folder: Path, user: str) -> Path:
    return folder / f"{user}.nk"


def write_accounts(folder: Path, callers: Iterable[str] = (), feature_subject: str = "") -> list[str]:
    """Makes what is missing; returns the users. `callers`: names of further clients, beside `client`.

    Raises InvalidRequest for a name that can't be one, or a file there that is no seed."""
    callers = list(callers)
    for name in callers:
        if not _CALLER.fullmatch(name):
            raise InvalidRequest(f"a caller's name is 1 to 64 of A-Z a-z 0-9 _ -, and not {name!r}")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    known = {path.stem for path in folder.glob(f"{CLIENT}-*.nk")}
    users = [kind for kind in GRANTS if kind != SOURCE or feature_subject]
    users += sorted(known | {f"{CLIENT}-{name}" for name in callers})
    entries = []
    for user in users:
        key = public_key(_seed(seed_path(folder, user)))
        kind = CLIENT if user.startswith(CLIENT) else user
        entries.append(_user(user, key, permissions(kind, inbox_of(key), feature_subject)))
    text = _CONFIGURATION.format(users="\n".join(entries))
    _write(folder / ACCOUNTS, text)
    return users


def _seed(path: Path) -> str:
    if path.exists():
        return path.read_text(errors="replace").strip()  # which is no seed then, and told so
    import nkeys  # only this command makes keys

    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER).decode()
    _write(path, seed + "\n")
    return str(seed)


def _write(path: Path, text: str) -> None:
    """Whole or not at all. Others may read the file itself, as a container's user must that it is mounted for: it is
    their way to it that the folder closes."""
    made = path.with_suffix(".new")
    made.write_text(text)
    made.chmod(0o644)
    os.replace(made, path)


def _user(user: str, key: str, allowed: Permissions) -> str:
    replies, told = allowed.replies, ""
    if replies is not None:
        told = f'\n        allow_responses: {{max: {replies.most}, expires: "{replies.seconds}s"}}'
    return f"""\
      # {user}
      {{nkey: {key}, permissions: {{
        publish: {{allow: {json.dumps(list(allowed.publish))}}}
        subscribe: {{allow: {json.dumps(list(allowed.subscribe))}}}{told}
      }}}}"""


_CONFIGURATION = """\
# Made by `pdbus keys nats`, which writes it anew: change nothing here.
accounts {{
  PDBUS {{
    jetstream: enabled
    users: [
{users}
    ]
  }}
}}
"""
