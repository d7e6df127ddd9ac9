"""Plain data as msgpack, whatever it holds."""

from __future__ import annotations

from typing import Any

import msgpack


def pack(tree: Any) -> bytes:
    """What has no form on the wire is left out."""
    try:
        packed: bytes = msgpack.packb(tree, use_bin_type=True)
    except (OverflowError, ValueError, TypeError):
        return b"\xc1"
    return packed
