"""What a caller's Cache-Control header means for the result cache (RFC 9111, the request directives that apply)."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheControl:
    """The default: take a cached answer of any age, and keep the new one."""

    read: bool = True
    store: bool = True
    max_age_s: int | None = None

    @classmethod
    def parse(cls, header: str) -> CacheControl:
        """Unknown directives are ignored, as the RFC asks; a malformed age counts as 0."""
        directives = [part.strip().lower() for part in header.split(",")]
        no_store = "no-store" in directives
        ages = [part.partition("=")[2].strip('" ') for part in directives if part.startswith("max-age=")]
        age = (int(ages[0][:9]) if re.fullmatch(r"[0-9]+", ages[0]) else 0) if ages else None
        return cls(read=not no_store and "no-cache" not in directives, store=not no_store, max_age_s=age)
