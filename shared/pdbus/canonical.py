"""Canonical bytes and digests: one typed, length-prefixed encoding, identical in every process and language.

A value is a tag byte, the payload's length as 8 bytes big-endian, and the payload:

    n None | t True | f False | i int (ASCII decimal) | d float (IEEE 754 binary64, big-endian, -0.0 as 0.0)
    s str (UTF-8) | b bytes | l list or tuple (its items, encoded) | m mapping (key, value pairs by encoded key)

Because every field carries its type and length, no two different values share an encoding: ("a", "bc") and ("ab", "c")
differ, 1 and "1" and 1.0 differ, and an absent field (None) differs from every default.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Value: TypeAlias = "bool | int | float | str | bytes | Sequence[Value] | Mapping[str, Value] | None"

DIGEST_BYTES = 32


def encode(value: Value) -> bytes:
    """The canonical bytes of `value`. Raises TypeError for a foreign type, ValueError for NaN (it equals nothing)."""
    match value:
        case None:
            return _field(b"n", b"")
        case True:
            return _field(b"t", b"")
        case False:
            return _field(b"f", b"")
        case int():
            return _field(b"i", b"%d" % value)
        case float():
            if math.isnan(value):
                raise ValueError("NaN has no canonical encoding")
            return _field(b"d", struct.pack(">d", value + 0.0))
        case str():
            return _field(b"s", value.encode())
        case bytes() | bytearray() | memoryview():
            return _field(b"b", bytes(value))
        case Mapping():
            pairs = sorted((encode(key), encode(item)) for key, item in value.items())
            return _field(b"m", b"".join(key + item for key, item in pairs))
        case Sequence():
            return _field(b"l", b"".join(map(encode, value)))
    raise TypeError(f"{type(value).__name__} has no canonical encoding")


def digest(value: Value) -> bytes:
    """SHA-256 over the canonical bytes of `value`."""
    return hashlib.sha256(encode(value)).digest()


def salted_digest(salt: bytes, content: bytes) -> bytes:
    """HMAC-SHA256: a key that nobody can make, or check a guess by, who does not have the salt."""
    return hmac.digest(salt, content, hashlib.sha256)


def content_digest(content: bytes | bytearray | memoryview) -> bytes:
    """SHA-256 of raw bytes: how blocks are addressed."""
    return hashlib.sha256(content).digest()


def _field(tag: bytes, payload: bytes) -> bytes:
    return tag + len(payload).to_bytes(8, "big") + payload
