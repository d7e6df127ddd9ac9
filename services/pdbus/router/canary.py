"""Which ref a session that names none is served by. Pure.

A ref with a share takes that part of the sessions, by a stable hash: a session keeps its version for as long as the
shares stay, on every router, and raising one share moves no session that had another canary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

_STEPS = 1 << 32


def ref_of(session: bytes, shares: Mapping[str, float], default: str) -> str:
    """The first ref by name whose share takes the session; each looks at those that the ones before it left."""
    for name in sorted(shares):
        drawn = hashlib.sha256(name.encode() + b"\\0" + session).digest()
        if int.from_bytes(drawn[:4], "big") < shares[name] * _STEPS:
            return name
    return default
