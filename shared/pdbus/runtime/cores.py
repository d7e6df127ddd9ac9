"""How many processor cores this process may use; `os.cpu_count()` tells those of the machine, wrong in a container.

Sources: Linux's Documentation/admin-guide/cgroup-v2.rst (`cpu.max`) and scheduler/sched-bwc.rst (`cpu.cfs_*_us`).
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath


def usable_cores(root: Path = Path("/")) -> int:
    """By this process's affinity and the CPU quotas of its control groups, read below `root`; at least 1.

    A quota is rounded down: threads beyond it would only have all of them stopped for a part of each period."""
    return max(1, int(min([_affine(), *_quotas(root)])))


def _affine() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path) -> list[float]:
    """In cores: of each group that this process is in, and of the groups above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, quota = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            mount, quota = root / "sys/fs/cgroup" / "cpu", _quota_v1
        else:
            continue
        group = PurePosixPath(path)
        # A container may see its own group as the root of what is mounted: what isn't there sets no bound.
        found += [cores for part in (group, *group.parents) if (cores := quota(mount / str(part).lstrip("/"))) > 0]
    return found


def _quota_v2(group: Path) -> float:
    """0: none."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return 0.0
    return 0.0 if quota == "max" else int(quota) / int(period)


def _quota_v1(group: Path) -> float:
    try:
        quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return 0.0
    return max(quota, 0) / period
