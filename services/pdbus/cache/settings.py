"""Settings of a cache node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdbus.settings import Settings, SettingsError

STORE_SHARE = 0.7
"""Of the memory given to the node: the rest is for values on their way and for what Python needs beside the entries."""


@dataclass(frozen=True, kw_only=True)
class CacheSettings(Settings):
    cache_bytes: int = 512 << 20
    """Memory of the node."""
    data: Path | None = None
    """Where the disk tier lies; without it there is none."""
    disk_bytes: int = 2 << 30
    """Of the disk below `data`, for pages that the memory has no room for; 0: none."""
    cache_ttl_s: float = 6 * 3600.0
    """The longest that any entry stays, whatever its writer asked for."""
    cache_lag_s: float = 5.0
    """T: a node that hasn't confirmed the end of the log of invalidations for so long serves nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_bytes < 1 << 20:
            raise SettingsError("PDBUS_CACHE_BYTES must be at least 1048576")
        if self.disk_bytes and self.disk_bytes < 16 << 20:
            raise SettingsError("PDBUS_DISK_BYTES must be 0 or at least 16777216")
        if self.cache_ttl_s <= 0 or self.cache_lag_s <= 0:
            raise SettingsError("PDBUS_CACHE_TTL_S and PDBUS_CACHE_LAG_S must be above 0")
