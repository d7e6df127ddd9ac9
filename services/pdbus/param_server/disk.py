"""What a disk may refuse, told in words; and how a rename is made durable."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdbus.errors import Unavailable

_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """Turns the operating system's refusals into errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise Unavailable(f"the disk of {folder} is full: make room, or set PDBUS_DATA to another disk") from error
        raise Unavailable(f"{folder} can't be used: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
