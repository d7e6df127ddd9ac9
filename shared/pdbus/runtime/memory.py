"""glibc's heap, set for a process that takes in and gives out large frames."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h; see mallopt(3)."""
_MMAP_BYTES = 32 << 20
_TRIM_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """From now on memory that is freed stays with the process, up to 64 MiB of it, so that it can be used again.

    By itself glibc gives the frames of each transfer back to the system, and the next ones are paid for by a page fault
    for every 4 KiB: a sixth of what a worker does to read cached KV. The limits are those that it would come to, had it
    once freed a block of 32 MiB."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:  # else it is another C library
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
