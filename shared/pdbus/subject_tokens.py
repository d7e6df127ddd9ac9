"""Names as tokens of a subject, and back: percent-encoded, so that a name can never add a level or a wildcard."""

from __future__ import annotations

import re
from urllib.parse import unquote

_PLAIN = re.compile(r"[A-Za-z0-9_-]+")


class AnyToken(str):
    """A type of its own: the name `*`, which a caller may send, is a name like others and never a wildcard."""

    __slots__ = ()


def encode_token(name: str) -> str:
    """Percent-encodes all but `[A-Za-z0-9_-]`. Raises ValueError for an empty name."""
    if not name:
        raise ValueError("a subject token can't be empty")
    if _PLAIN.fullmatch(name):
        return name
    return re.sub(r"[^A-Za-z0-9_-]", lambda m: "".join(f"%{byte:02X}" for byte in m[0].encode()), name)


def decode_token(token: str) -> str:
    return unquote(token)
