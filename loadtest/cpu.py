"""Processor time of processes, from /proc: all their threads, to the microsecond."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def used_ms(pids: Mapping[str, int]) -> dict[str, float]:
    """Milliseconds on a core since each process began; only what its living threads used."""
    return {name: _used_ms(pid) for name, pid in pids.items()}


def per_request(before: Mapping[str, float], after: Mapping[str, float], requests: int) -> dict[str, float]:
    """Milliseconds a request by kind of process: `router-0` and `router-1` are both a router."""
    found: dict[str, float] = {}
    for name, used in after.items():
        kind = name.rstrip("-0123456789")
        found[kind] = found.get(kind, 0.0) + (used - before[name]) / max(requests, 1)
    return found


def _used_ms(pid: int) -> float:
    used_ns = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            used_ns += int(thread.read_text().split()[0])
        except (OSError, IndexError):
            continue  # it has ended since
    return used_ns / 1e6
