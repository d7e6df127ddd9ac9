"""`pdbus keys`: API keys of tenants, and the keys of services and callers on NATS."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

    from pdbus.stack.settings import StackSettings


def add_keys(commands: Subparsers) -> list[argparse.ArgumentParser]:
    """Adds the command; returns those of its parsers that lack the argument of the data folder."""
    keys = commands.add_parser("keys", help="who may ask: API keys of tenants, keys of services on NATS")
    actions = keys.add_subparsers(required=True, metavar="ACTION")

    add = actions.add_parser("add", help="make an API key; it is shown once")
    add.set_defaults(command=_add)
    add.add_argument("tenant", help="whose it is: nobody else sees that tenant's results or caches")
    add.add_argument("--requests-per-minute", type=_positive, metavar="N", help="of one router (default: no limit)")
    add.add_argument("--tokens-per-minute", type=_positive, metavar="N", help="read and written (default: no limit)")
    add.add_argument("--max-inflight", type=_positive, metavar="N", help="choices at once (default: no limit)")
    add.add_argument("--priority", type=_priority, default=5, metavar="0..9", help="most it may ask for (default: 5)")
    listed = actions.add_parser("list", help="all keys, without the keys themselves")
    listed.set_defaults(command=_list)
    revoke = actions.add_parser("revoke", help="make a key worthless, in every router within a second")
    revoke.set_defaults(command=_revoke)
    revoke.add_argument("id", help="as `pdbus keys list` has it")
    for action in (add, listed, revoke):
        action.add_argument(
            "--file", type=Path, help="the keys file (default: PDBUS_KEYS_FILE, else the data folder's)"
        )

    nats = actions.add_parser("nats", help="a NATS user for each kind of service, and the server's accounts file")
    nats.set_defaults(command=_nats)
    nats.add_argument("folder", type=Path, metavar="DIR", help="where keys are kept, and made where they are missing")
    nats.add_argument("--client", action="append", default=[], metavar="NAME", help="a key for a caller of that name")
    nats.add_argument("--feature-subject", default="", metavar="SUBJECT", help="as the routers' PDBUS_FEATURE_SUBJECT")
    return [add, listed, revoke]


def _positive(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 10**12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _priority(text: str) -> int:
    if not text.isdigit() or int(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a priority from 0 to 9")
    return int(text)


def _nats(given: argparse.Namespace, settings: StackSettings) -> int:
    from rich.console import Console

    from pdbus.stack.nats_accounts import ACCOUNTS, write_accounts

    users = write_accounts(given.folder, given.client, given.feature_subject)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{given.folder / ACCOUNTS}: {len(users)} users ({', '.join(users)}), a seed for each beside it")
    return 0


def _file(given: argparse.Namespace, settings: StackSettings) -> Path:
    from pdbus.stack.folder import Folder

    file: Path = given.file or settings.keys_file or Folder(given.data or settings.data).keys_file
    return file


def _add(given: argparse.Namespace, settings: StackSettings) -> int:
    from pdbus import keyfile

    path = _file(given, settings)
    first = not path.exists()
    made = keyfile.add(
        path,
        given.tenant,
        requests_per_minute=given.requests_per_minute,
        tokens_per_minute=given.tokens_per_minute,
        max_inflight=given.max_inflight,
        priority=given.priority,
    )
    sys.stdout.write(f"{made.text}\n")
    sys.stderr.write(f"This is the only time that the key is shown. Its id is {made.entry.id}; it is kept in {path}.\n")
    if first:
        sys.stderr.write("Routers that run without a keys file ask for none until they are started again with it.\n")
    return 0


def _list(given: argparse.Namespace, settings: StackSettings) -> int:
    from pdbus import keyfile

    form = "{:<14}{:<27}{:>13}{:>15}{:>9}{:>10}  {}\n"
    keys = keyfile.read(_file(given, settings)).keys
    sys.stdout.write(form.format("id", "made", "requests/min", "tokens/min", "at once", "priority", "tenant"))
    for entry in keys:
        limits = (entry.requests_per_minute, entry.tokens_per_minute, entry.max_inflight)
        shown = ["-" if limit is None else limit for limit in limits]
        sys.stdout.write(form.format(entry.id, entry.created, *shown, entry.priority, entry.tenant))
    return 0


def _revoke(given: argparse.Namespace, settings: StackSettings) -> int:
    from pdbus import keyfile

    entry = keyfile.revoke(_file(given, settings), given.id)
    sys.stdout.write(f"revoked: key {entry.id} of {entry.tenant}\n")
    return 0
