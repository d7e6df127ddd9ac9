"""Features by item key: what routers are asked, and what they ask of a caller's own service."""

from __future__ import annotations

from dataclasses import dataclass

MOST_KEYS = 1024
"""In one request to a router; it asks the service in smaller pieces."""
LONGEST_KEY = 256
"""Characters."""


@dataclass(frozen=True, slots=True)
class FeaturesRequest:
    """To routers."""

    keys: tuple[str, ...]
    cache_control: str = ""
    """As the HTTP header: no-store, no-cache, max-age=SECONDS."""


@dataclass(frozen=True, slots=True)
class FeaturesReply:
    version: str
    """Of all values: they are of one version."""
    values: tuple[bytes | None, ...]
    """One for each key, in order; None where the service has no such item."""
    hits: int
    """Of the keys, those that the service was not asked for."""


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """To a caller's own service. Without keys: it tells its version only."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourceReply:
    version: str
    """Of the service's data; another one makes all that it said before void."""
    values: tuple[bytes | None, ...]
    """One for each key, in order: fp32 vectors as a rule, but nobody looks into them. None: there is no such item."""
