"""Memory of processes, from /proc. Imports nothing that would take memory itself."""

from __future__ import annotations

from pathlib import Path


def peak_bytes(pid: int | str = "self") -> int:
    """The most memory that the process ever had resident; 0 where it is gone.

    VmHWM begins anew with a program; getrusage's figure would hold what the program's parent had, too."""
    return _status(pid, "VmHWM:")


def resident_bytes(pid: int | str = "self") -> int:
    """What the process has resident now; 0 where it is gone."""
    return _status(pid, "VmRSS:")


def _status(pid: int | str, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), 0)
