"""A moment written into a row, so that whoever reads it knows how old it is: exact in fp32 for 167 seconds.

The clock is the machine's monotonic one, which its processes share."""

from __future__ import annotations

import time

import numpy as np

from pdbus.weights.blocks import Array

_TICK_S = 1e-5
_TICKS = 1 << 24


def mark(row: Array) -> None:
    """Writes now into the row's first number."""
    row[0] = int(time.monotonic() / _TICK_S) % _TICKS


def ages_ms(rows: Array) -> Array:
    """How long ago each row [n, width] was marked."""
    now = int(time.monotonic() / _TICK_S) % _TICKS
    return (now - rows[:, 0].astype(np.int64)) % _TICKS * _TICK_S * 1e3
