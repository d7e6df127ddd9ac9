"""What a figure depends on besides the code: processor, load by others, memory bandwidth."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

_READ_BYTES = 128 << 20
"""Of each thread: far above any cache."""
_READS = 5


def describe() -> dict[str, Any]:
    """Processor, cores, its vector extensions, and the load average of the last minute."""
    info = _cpuinfo()
    known = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
    return {
        "cpu": info.get("model name", "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "extensions": [name for name in known if name in info.get("flags", "").split()],
        "load_average": round(os.getloadavg()[0], 2),
    }


def read_bandwidth(threads: int) -> float:
    """Bytes a second that `threads` threads read from memory together: the best of a few passes over large arrays."""
    arrays = [np.ones(_READ_BYTES // 8, np.float64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        best_s = min(_timed(pool, arrays) for _ in range(_READS))
    return threads * _READ_BYTES / best_s


def _timed(pool: ThreadPoolExecutor, arrays: list[np.ndarray]) -> float:
    start = time.perf_counter()
    list(pool.map(_read, arrays))
    return time.perf_counter() - start


def _read(array: np.ndarray) -> float:
    # Of numpy's reductions the one that keeps up with memory; it runs without the interpreter's lock.
    return float(np.max(array))


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
