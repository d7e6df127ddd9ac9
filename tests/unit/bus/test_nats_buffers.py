"""Memory for large payloads is used again, and never while somebody still looks at it."""

from __future__ import annotations

import random

import numpy as np

from pdbus.bus.nats_buffers import KEPT, KEPT_BYTES, Buffers


def at(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_what_nobody_looks_at_is_taken_again() -> None:
    buffers = Buffers()
    first = buffers.take(100_000)
    where = at(first)
    del first
    assert at(buffers.take(300_000)) == where


def test_any_view_keeps_it() -> None:
    buffers = Buffers()
    part = buffers.take(100_000)[10:20]
    array = np.frombuffer(buffers.take(100_000), np.uint8)
    assert len({at(part) - 10, array.ctypes.data, at(buffers.take(100_000))}) == 3


def test_what_is_taken_is_nobody_else_s() -> None:
    """However many are out at once, and whatever their sizes."""
    generator, buffers = random.Random(1), Buffers()
    out: list[tuple[memoryview, int]] = []
    for number in range(400):
        view = buffers.take(generator.choice((70_000, KEPT_BYTES, KEPT_BYTES + 1)))
        view[:] = bytes([number % 251]) * len(view)
        out.append((view, number % 251))
        del view
        if len(out) > generator.randrange(3 * KEPT):
            found, filled = out.pop(generator.randrange(len(out)))
            assert bytes(found) == bytes([filled]) * len(found)
            del found
