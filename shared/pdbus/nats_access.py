"""How a process shows NATS who it is, and knows whom it talks to: NKeys or credentials, and TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdbus.errors import InvalidRequest

OPEN_INBOX = "_INBOX"
"""Of processes without a key of their own."""
_NAME_CHARS = 16
"""Of a user's public key: the key's kind, and 75 bits."""


def inbox_of(public_key: str) -> str:
    """The prefix of all subjects by which that user gets replies. Nobody else may subscribe below it."""
    return f"{OPEN_INBOX}.{public_key[:_NAME_CHARS]}"


def shown(urls: str) -> str:
    """Addresses of servers, without users and passwords."""
    return ", ".join(url.strip().rpartition("//")[2].rpartition("@")[2] for url in urls.split(","))


@dataclass(frozen=True, kw_only=True)
class NatsAccess:
    """Files that are read again at each connection, so that keys can be changed under a running process.

    None of it: the server is open, and the network to it is trusted."""

    seed: Path | None = None
    """Of a user's NKey, as `pdbus keys nats` writes it."""
    creds: Path | None = None
    """A JWT and its seed, of an operator's own making; instead of `seed`."""
    ca: Path | None = None
    """Certificates that the server's must be signed by: TLS is then asked for, and nothing else taken."""
    cert: Path | None = None
    """This process's own, for servers that verify their clients; with `key`."""
    key: Path | None = None

    def inbox(self) -> str:
        """Raises InvalidRequest where there is no usable key."""
        if self.seed is not None:
            return inbox_of(public_key(self._seed(self.seed)))
        if self.creds is not None:
            lines = self._read(self.creds).splitlines()
            at = next((n for n, line in enumerate(lines) if "BEGIN USER NKEY SEED" in line), len(lines))
            return inbox_of(public_key("".join(lines[at + 1 : at + 2])))
        return OPEN_INBOX

    def options(self) -> dict[str, Any]:
        """For nats-py's `connect`. Raises InvalidRequest that names the file which can't be used."""
        options: dict[str, Any] = {"inbox_prefix": self.inbox()}
        if self.seed is not None:
            options["nkeys_seed_str"] = self._seed(self.seed)
        elif self.creds is not None:
            options["user_credentials"] = str(self.creds)
        tls = self._tls()
        if tls is not None:
            options["tls"] = tls
        return options

    def _tls(self) -> ssl.SSLContext | None:
        if self.ca is None and self.cert is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise InvalidRequest(f"PDBUS_NATS_CA, _CERT or _KEY can't be used: {error}") from None
        return context

    def _seed(self, path: Path) -> str:
        return self._read(path).strip()

    def _read(self, path: Path) -> str:
        try:
            return path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the NATS key {path} can't be read: {type(error).__name__}") from None


def public_key(seed: str) -> str:
    """Of a user's seed. Raises InvalidRequest, without the seed, where it is none."""
    import nkeys  # here, as nats-py has it: only who has a key pays for loading it

    try:
        return str(nkeys.from_seed(bytearray(seed.strip().encode())).public_key.decode())
    except Exception:  # nkeys and what it stands on raise all sorts for text that is no seed
        raise InvalidRequest("a NATS key file holds no NKey seed of a user (SU…)") from None
