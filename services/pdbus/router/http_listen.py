"""Where the HTTP front listens, and with which certificate."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from pdbus.errors import InvalidRequest


def tls_of(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """None where there is no certificate. Raises InvalidRequest for one that can't be used."""
    if cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise InvalidRequest(f"PDBUS_HTTP_CERT or PDBUS_HTTP_KEY can't be used: {error}") from None
    return context


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError where the address can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError:
        listening.close()
        raise
    return listening
