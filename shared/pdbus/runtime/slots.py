"""A durable identity for each of several equal processes that share a folder.

A container's host name changes whenever it is made anew, but a param-server is a member for good, under one id, with
one block store. Replicas that share a volume therefore take numbered places in it: the first place whose lock is free
is this process's id and data folder, and the next container that is started takes up what an ended one left.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdbus.settings import SettingsError

_MOST = 64


@contextmanager
def slot(folder: Path, service: str) -> Iterator[Path]:
    """Holds the first free place `<folder>/<service>-<n>` while the scope lasts; its name is the id.

    Raises SettingsError when all places are taken, OSError where the folder can't be written."""
    for number in range(1, _MOST + 1):
        place = folder / f"{service.replace('_', '-')}-{number}"
        place.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / f"{place.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        try:
            yield place
            return
        finally:
            os.close(fd)
    raise SettingsError(f"all {_MOST} places in {folder} are taken")
