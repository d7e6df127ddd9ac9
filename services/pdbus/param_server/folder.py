"""The folder of a block store: who may use it, and what is remembered beside the packs.

lock             held (flock) while a server uses the folder; the kernel frees it when the process dies
store.json       what the folder is: format and model
checkpoint.json  which checkpoint was read last (its files), and the root that it yielded
wish.json        the root that this server last asked the log for (commit.py)
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdbus.canonical import DIGEST_BYTES
from pdbus.errors import Conflict
from pdbus.messages.common import Digest
from pdbus.param_server.disk import sync_folder, told

_FORMAT = 1


@contextmanager
def claim(folder: Path, model: str) -> Iterator[None]:
    """Holds `folder` for this process as the block store of `model`, made if need be.

    Raises Conflict where another process holds it or where it is something else; Unavailable where it can't be
    written."""
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another param-server uses {folder}: give each its own PDBUS_DATA") from None
        with told(folder):
            _check(folder, model)
        yield
    finally:
        os.close(fd)


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty where there is none or it can't be read."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_digest(value: object) -> Digest | None:
    """One that was written in hex; None for anything else."""
    try:
        digest = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_BYTES else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces `path`, whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    with new.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(path.parent)


def _check(folder: Path, model: str) -> None:
    path = folder / "store.json"
    want = {"pdbus-block-store": _FORMAT, "model": model}
    found = read_json(path)
    if not found:
        if any(entry.name not in {"lock", "store.json", "store.json.new"} for entry in folder.iterdir()):
            raise Conflict(f"{folder} holds something else than a block store: set PDBUS_DATA to an empty folder")
        write_json(path, want)
    elif found != want:
        raise Conflict(f"{folder} is the block store of {found.get('model', 'another format')!r}, not of {model!r}")
