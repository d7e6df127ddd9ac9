"""The file of API keys: whose each is and what it may do. Of the keys themselves it holds only hashes.

A key is 256 bits drawn at random, so one SHA-256 of it is enough: a slow hash is for what people think up. Its id,
which `pdbus keys list` shows, is a part of the key's text. The file's secret salts all that is cached for a tenant, and
has to be the same for all routers of an installation: they share the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from pdbus.context import DEFAULT_PRIORITY, HIGHEST_PRIORITY
from pdbus.errors import Conflict, InvalidRequest, NotFound

_KEY = re.compile(r"pdk-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
_TENANT = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_Limit: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=10**12)] | None
ANONYMOUS = "anonymous"
"""Everybody, where no keys are asked for."""


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One key. Limits are those of each router; None: no limit."""

    id: str
    tenant: Annotated[str, msgspec.Meta(pattern=rf"\A{_TENANT.pattern}\Z")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    """Of the key's whole text, in hex."""
    created: str = ""
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    """Read and written."""
    max_inflight: _Limit = None
    """Choices at once."""
    priority: Annotated[int, msgspec.Meta(ge=0, le=HIGHEST_PRIORITY)] = DEFAULT_PRIORITY
    """The most that it may ask for, 0 to 9."""


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of it."""

    version: int = 1
    secret: str
    """256 random bits in hex."""
    keys: tuple[KeyEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class NewKey:
    """`text` is shown once and kept nowhere."""

    entry: KeyEntry
    text: str


def read(path: Path) -> KeyFile:
    """Raises InvalidRequest for a file that is missing or broken; it never tells of its content."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=KeyFile)
        if found.version != 1 or len(bytes.fromhex(found.secret)) != 32:
            raise ValueError("another version")
    except OSError as error:
        raise InvalidRequest(f"the keys file {path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        raise InvalidRequest(f"the keys file {path} can't be used: `pdbus keys` made no such file") from None
    return found


def add(path: Path, tenant: str, **limits: int | None) -> NewKey:
    """Makes a key, and the file where there is none. `limits`: of KeyEntry. Raises InvalidRequest."""
    if not _TENANT.fullmatch(tenant) or tenant == ANONYMOUS:
        raise InvalidRequest(f"a tenant's name is 1 to 64 of A-Z a-z 0-9 . _ @ -, and not {ANONYMOUS}")
    id = secrets.token_hex(6)
    text = f"pdk-{id}-{secrets.token_urlsafe(32)}"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    entry = KeyEntry(id=id, tenant=tenant, sha256=digest_of(text), created=now, **limits)  # type: ignore[arg-type]
    _change(path, lambda file: replace_keys(file, (*file.keys, entry)))
    return NewKey(entry, text)


def revoke(path: Path, id: str) -> KeyEntry:
    """Takes a key out; routers notice within a second. Raises NotFound, InvalidRequest."""
    known = next((entry for entry in read(path).keys if entry.id == id), None)
    if known is None:
        raise NotFound(f"there is no key {id}: `pdbus keys list` shows those there are")
    _change(path, lambda file: replace_keys(file, tuple(entry for entry in file.keys if entry.id != id)))
    return known


def replace_keys(file: KeyFile, keys: tuple[KeyEntry, ...]) -> KeyFile:
    return msgspec.structs.replace(file, keys=keys)


def id_of(text: str) -> str | None:
    """Of what may be a key. None for what can't be one."""
    found = _KEY.fullmatch(text)
    return found[1] if found else None


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def matches(entry: KeyEntry, text: str) -> bool:
    """In a time that tells nothing of how far they agree."""
    return hmac.compare_digest(entry.sha256, digest_of(text))


def _change(path: Path, change: Callable[[KeyFile], KeyFile]) -> None:
    """One process at a time; the file is replaced whole or not at all, and only its owner may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict("another `pdbus keys` is changing the file just now") from None
        file = read(path) if path.exists() else KeyFile(secret=secrets.token_hex(32))
        made = path.with_suffix(".new")
        made.unlink(missing_ok=True)
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(msgspec.json.format(msgspec.json.encode(change(file)), indent=1) + b"\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(made, path)
    finally:
        os.close(fd)
