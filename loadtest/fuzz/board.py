"""What a fuzzing process has done so far, in a file that its parent reads even where the process died."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FIELDS = ("inputs", "refused", "accepted", "crashes", "hangs", "slowest_us", "slowest_at")


class Board:
    """Counters by name; of one process, or in a file that another reads."""

    def __init__(self, cells: memoryview | None = None) -> None:
        self._cells = cells if cells is not None else memoryview(bytearray(8 * len(FIELDS))).cast("q")

    def __getitem__(self, field: str) -> int:
        value: int = self._cells[FIELDS.index(field)]
        return value

    def __setitem__(self, field: str, value: int) -> None:
        self._cells[FIELDS.index(field)] = value


@contextmanager
def shared_board(path: Path) -> Iterator[Board]:
    """Made where it is not there yet."""
    with path.open("a+b") as file:
        file.truncate(8 * len(FIELDS))
        with mmap.mmap(file.fileno(), 8 * len(FIELDS)) as memory, memoryview(memory).cast("q") as cells:
            yield Board(cells)
