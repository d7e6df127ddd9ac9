"""Memory that is free but not given back: a process that has loaded a model keeps none of it."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Gives what the C library keeps of freed memory back to the system, where it can (glibc: malloc_trim(3)).

    Takes milliseconds, in which other threads may have to wait for an allocation."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
