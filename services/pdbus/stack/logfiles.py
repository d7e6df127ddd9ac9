"""The log file of one child process: bounded, and readable when the child fails.

Children write to the file themselves, opened for appending, so that neither a stalled nor a killed launcher can block
or lose their lines. The launcher only keeps it bounded: a full file is copied aside and cut to nothing in place.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from pathlib import Path

MAX_BYTES = 8 << 20


class LogFile:
    """<id>.log, and <id>.log.1 for what was before it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> int:
        """A descriptor for a child's output. The caller closes its own copy after the start."""
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def bound(self, max_bytes: int = MAX_BYTES) -> None:
        """Moves the content aside if it has outgrown `max_bytes`. Lines written during the copy may be lost."""
        if self.path.exists() and self.path.stat().st_size > max_bytes:
            shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.1"))
            os.truncate(self.path, 0)

    def tail(self, lines: int = 15, since_byte: int = 0) -> list[str]:
        """The last lines, of what was written after `since_byte` (where one run's output begins)."""
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(since_byte if since_byte <= size else 0)
            return [line.decode(errors="replace").rstrip() for line in deque(file, maxlen=lines)]

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0
