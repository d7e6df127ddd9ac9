"""Page bytes through what the tiers below a worker do with them: memory of a cache node, and its disk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from pdbus.caching.compression import pack, unpack
from pdbus.caching.disk import DiskStore
from pdbus.caching.entry import Entry
from pdbus.messages.common import Digest

_TTL_S = 3600.0


def through_memory(pages: Mapping[Digest, bytes]) -> dict[Digest, bytes]:
    """As a cache node keeps them: compressed where that pays."""
    kept = {key: (pack(value), value) for key, value in pages.items()}
    return {key: value if packed is None else unpack(packed, len(value)) for key, (packed, value) in kept.items()}


def through_disk(pages: Mapping[Digest, bytes], folder: Path) -> dict[Digest, bytes]:
    """Written to a node's segments and read from them by a second life of the node."""
    wall_s, root = time.time() - time.monotonic(), bytes(32)
    budget_bytes = 4 * sum(map(len, pages.values())) + (1 << 26)
    first = DiskStore(folder, budget_bytes, len(pages), wall_s)
    first.open()
    for key, value in pages.items():
        now_s = time.monotonic()
        entry = Entry("kv", key, root, "", b"", value, len(value), now_s, now_s + _TTL_S)
        place = first.begin(entry)
        assert place, "there is room"
        first.write(place, value)
        first.commit(place)
    second = DiskStore(folder, budget_bytes, len(pages), wall_s)
    second.open()
    found = {key: second.get(key, root, time.monotonic()) for key in pages}
    return {key: bytes(second.read(entry)) for key, entry in found.items() if entry}
