"""Who asks: the tenant behind an API key, and what that key may do.

Without a keys file everybody is the tenant "anonymous", whatever key is sent: clients of OpenAI's always send one. With
one, a request without a known key is refused. The file is looked at again at most once a second; one that can't be
read any more changes nothing, and one that was there at the start and is gone lets nobody in.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdbus import keyfile
from pdbus.canonical import digest
from pdbus.context import HIGHEST_PRIORITY
from pdbus.errors import InvalidRequest, Unauthorized
from pdbus.keyfile import ANONYMOUS, KeyEntry, KeyFile

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Quota:
    """Of one key in one router. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_inflight: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """Whoever sent a request, as far as it is proven."""

    tenant: str
    quota: Quota
    priority_most: int
    key_id: str = ""
    """Empty where no key was asked for."""


OPEN: Final = Identity(ANONYMOUS, Quota(), HIGHEST_PRIORITY)
"""Where no keys are asked for."""


class Identities:
    """Used from one event loop."""

    def __init__(self, path: Path | None = None, now: Callable[[], float] = time.monotonic) -> None:
        """`path`: of the keys file; None: no keys are asked for. Raises InvalidRequest for one that can't be used."""
        self._path = path
        self._now = now
        self._secret = b""
        self._entries: dict[str, tuple[KeyEntry, Identity]] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._looked_at = float("-inf")
        if path is not None:
            self._stamp = _stamp(path)
            self._take(keyfile.read(path))
            self._looked_at = now()

    @property
    def wanted(self) -> bool:
        """Whether a key is asked for."""
        return self._path is not None

    def of(self, token: str | None) -> Identity:
        """Raises Unauthorized, never with any of the token in it."""
        if self._path is None:
            return OPEN
        self._look_again(self._path)
        if not token:
            raise Unauthorized("no API key was sent: it goes into the header Authorization, after 'Bearer '")
        known = self._entries.get(keyfile.id_of(token) or "")
        if known is None or not keyfile.matches(known[0], token):
            raise Unauthorized("the API key is not known here")
        return known[1]

    def by_id(self, key_id: str) -> Identity:
        """Whoever submitted something by that key, which is done only now. Raises Unauthorized once it is revoked."""
        if self._path is None:
            return OPEN
        self._look_again(self._path)
        known = self._entries.get(key_id)
        if known is None:
            raise Unauthorized("the API key that this was submitted with is not known here any more")
        return known[1]

    def salt(self, tenant: str) -> bytes:
        """Joins every key under which something of the tenant is cached: its entries are never another's.

        With a keys file nobody who has not read that can make such a key, nor confirm a guessed prompt by one."""
        if not self._secret:
            return digest(["pdbus tenant salt", tenant])
        return hmac.digest(self._secret, b"pdbus tenant salt\0" + tenant.encode(), hashlib.sha256)

    def _look_again(self, path: Path) -> None:
        now = self._now()
        if now - self._looked_at < LOOK_AGAIN_S:
            return
        self._looked_at = now
        stamp = _stamp(path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        if stamp is None:
            log.error("the keys file is gone: nobody is let in until it is back")
            self._entries = {}
            return
        try:
            self._take(keyfile.read(path))
        except InvalidRequest as error:
            log.error("%s; the keys before it stay in force", error.message)

    def _take(self, file: KeyFile) -> None:
        self._secret = bytes.fromhex(file.secret)
        self._entries = {entry.id: (entry, _identity(entry)) for entry in file.keys}


def _identity(entry: KeyEntry) -> Identity:
    quota = Quota(entry.requests_per_minute, entry.tokens_per_minute, entry.max_inflight)
    return Identity(entry.tenant, quota, entry.priority, entry.id)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
