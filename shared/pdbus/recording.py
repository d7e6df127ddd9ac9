"""A record of what a process admitted, pinned, read, stored and told: for the checker of DESIGN.md section 6.

Off unless a folder is given, and then nothing is made at all: users hold a `Recorder | None`. A line of JSON for each
event, each written at once, so that a kill -9 loses none but the one that is being written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

Told: TypeAlias = str | int | bool | bytes | None

MOST_BYTES = 256 << 20
"""Of one process's file; what comes later is only counted, in a last line."""
DIGEST_CHARACTERS = 16
"""Of a digest in hex: enough to tell the few thousand of a run apart."""


class Recorder:
    """Writes the events of one life of a process, numbered from 1 in their order. Used from one thread."""

    def __init__(self, path: Path, process: str, most_bytes: int = MOST_BYTES) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._left = most_bytes
        self._number = 0
        self.lost = 0
        """Events for which there was no room."""
        self.put("start", process=process)

    def put(self, event: str, **fields: Told) -> None:
        """Bytes are digests. Fields that are None are left out."""
        self._number += 1
        line: dict[str, object] = {"n": self._number, "t": time.time_ns(), "e": event}
        for name, value in fields.items():
            if value is not None:
                line[name] = short(value) if isinstance(value, bytes) else value
        encoded = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if self.lost or len(encoded) > self._left:
            self.lost += 1
            return
        self._left -= len(encoded)
        os.write(self._file, encoded)

    def close(self) -> None:
        if self.lost:
            line = {"n": self._number + 1, "t": time.time_ns(), "e": "full", "lost": self.lost}
            os.write(self._file, json.dumps(line).encode() + b"\n")
        os.close(self._file)


def short(digest: bytes) -> str:
    return digest.hex()[:DIGEST_CHARACTERS]


@contextmanager
def recording(folder: Path | None, service: str, id: str, incarnation: str) -> Iterator[Recorder | None]:
    """Records into `folder` while the scope lasts; None without one. Raises OSError."""
    if folder is None:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder / f"{id}-{incarnation[:8]}.jsonl", f"{service} {id}")
    try:
        yield recorder
    finally:
        recorder.close()
