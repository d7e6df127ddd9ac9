"""When a tenant floods another: routers and workers have to see it alike."""

from __future__ import annotations

FLOOD_TIMES, _FLOOD_LEAST = 2, 8


def most_beside(count: int) -> int:
    """Whoever has more in hand floods a tenant that has so much: above both of so many times as much, and so many."""
    return max(FLOOD_TIMES * count, _FLOOD_LEAST)
