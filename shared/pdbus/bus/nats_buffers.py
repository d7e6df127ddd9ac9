"""Memory for large payloads, taken again once nobody looks at it any more.

New memory is cleared twice, by the system page after page and by Python: for a bulk frame that takes as long as reading
it from the socket."""

from __future__ import annotations

KEPT_BYTES = 704 << 10
"""Of each buffer that is kept: a bulk frame fits. Larger payloads get memory of their own."""
KEPT = 4
"""A reader that keeps up has no more of them at once."""


class Buffers:
    """None is made before it is needed, and it stays."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def take(self, size: int) -> memoryview:
        """So many bytes, of any content. They are the caller's as long as it, or anybody, has a view of them."""
        if size > KEPT_BYTES:
            return memoryview(bytearray(size))
        free = next(filter(_unseen, self._kept), None)
        if free is None:
            if len(self._kept) == KEPT:
                return memoryview(bytearray(size))
            free = bytearray(KEPT_BYTES)
            self._kept.append(free)
        return memoryview(free)[:size]


def _unseen(buffer: bytearray) -> bool:
    """Whether there is no view of it: else Python refuses to shorten it."""
    try:
        last = buffer.pop()
    except BufferError:
        return False
    buffer.append(last)
    return True
