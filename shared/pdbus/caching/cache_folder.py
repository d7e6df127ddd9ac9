"""A folder of files by key that all processes of a host may share: bounded in bytes, written whole or not at all.

blocks/ab/abcd…   a weight block, by its digest: a reader checks it, and deletes one that is damaged
packed/ab/abcd…   what was made of a layer, by a digest of what it was made from; it carries a checksum of its own
lock              held (flock) by whoever evicts, so that one process does at a time

A file's modification time, in seconds, is not a time but its worth (worth.py), so that all processes evict by the same
order and a restart forgets nothing; the lock's is the floor of worths.

A cache only makes things faster: where the disk refuses, it is as if nothing were there.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from pdbus.buffer import Buffer
from pdbus.caching.worth import Name, Worths, victims

log = logging.getLogger(__name__)

Kind: TypeAlias = Literal["blocks", "packed"]

_NEW = "new-"
"""Begins the name of a file that is being written."""
_LEFTOVER_S = 600.0
"""A file that has been in writing for so long belongs to a process that was killed."""
_SILENT_S = 60.0
"""After the disk has refused, nothing is written for so long."""
_FREED = 0.1
"""Of the budget, beyond what has to go: so that not every write evicts."""
_UNSEEN = 16
"""A process looks at the whole folder again after writing this fraction of the budget: others write there, too."""


class CacheFolder:
    """May be used from any thread. Holds nothing open.

    All processes of a folder together stay within `budget_bytes`, but for a sixteenth of it for each, and leave the
    disk at least half of what it has free."""

    def __init__(self, path: Path, budget_bytes: int) -> None:
        """Raises OSError where the folder can't be made."""
        self.path = path
        self.counts: Counter[str] = Counter()
        """evicted, damaged, refused: files."""
        self._budget = budget_bytes
        self._worths = Worths()
        self._numbers = itertools.count(1)
        self._mutex = threading.Lock()
        self._silent_until_s = 0.0
        self._unseen = 0
        for kind in ("blocks", "packed"):
            (path / kind).mkdir(parents=True, exist_ok=True)
        if not self._lock_file.exists():
            self._lock_file.touch()
            _set_worth(self._lock_file, 0.0)
        self._worths.floor = self._lock_file.stat().st_mtime
        self.used_bytes = self._evict()
        """As of the last look."""

    @property
    def _lock_file(self) -> Path:
        return self.path / "lock"

    def find(self, kind: Kind, key: bytes) -> Path | None:
        path = self._path(kind, key)
        return path if path.exists() else None

    def read(self, kind: Kind, key: bytes, name: Name, place: memoryview) -> bool:
        """Fills `place` with the file, and counts the read. False: it is not there, or of another size."""
        try:
            with self._path(kind, key).open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != len(place) or file.readinto(place) != len(place):
                    raise OSError("another size")
        except FileNotFoundError:
            return False
        except OSError:
            self.damaged(kind, key)
            return False
        self.used(kind, key, name)
        return True

    def used(self, kind: Kind, key: bytes, name: Name) -> None:
        """The file was read as what has this name."""
        _set_worth(self._path(kind, key), self._count(key, name))

    def damaged(self, kind: Kind, key: bytes) -> None:
        """The file is not what its key says: it goes."""
        self.counts["damaged"] += 1
        log.warning("%s/%s in %s is damaged: it is made anew", kind, key.hex()[:12], self.path)
        _remove(self._path(kind, key))

    def write(self, kind: Kind, key: bytes, name: Name, content: Buffer) -> bool:
        """False: the disk refuses; nothing of it is left there."""
        with self.creating(kind, key, name, len(content)) as path:
            if path is None:
                return False
            path.write_bytes(content)
        return self.find(kind, key) is not None

    @contextmanager
    def creating(self, kind: Kind, key: bytes, name: Name, size: int) -> Iterator[Path | None]:
        """A path at which to write a file of `size` bytes, that gets its name once the scope is left; None where the
        disk has refused lately, or has no room. What the disk refuses within the scope is logged, not raised."""
        if not self._has_room(size):
            yield None
            return
        new = self.path / kind / f"{_NEW}{os.getpid()}-{next(self._numbers)}"
        try:
            try:
                yield new
                final = self._path(kind, key)
                final.parent.mkdir(exist_ok=True)
                _set_worth(new, self._count(key, name))
                new.replace(final)
            except OSError as error:
                self._refused(error)
                return
            self._make_room(size)
        finally:
            _remove(new)

    def _count(self, key: bytes, name: Name) -> float:
        with self._mutex:
            return self._worths.read(name, key)

    def _has_room(self, size: int) -> bool:
        if size > self._budget // 2 or time.monotonic() < self._silent_until_s:
            return False
        try:
            if shutil.disk_usage(self.path).free >= 2 * size:
                return True
            self._refused(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        except OSError as error:
            self._refused(error)
        return False

    def _refused(self, error: OSError) -> None:
        self.counts["refused"] += 1
        self._silent_until_s = time.monotonic() + _SILENT_S
        log.warning("%s takes nothing for %.0f s: %s", self.path, _SILENT_S, error.strerror or error)

    def _path(self, kind: Kind, key: bytes) -> Path:
        name = key.hex()
        return self.path / kind / name[:2] / name

    def _make_room(self, written: int) -> None:
        with self._mutex:
            self.used_bytes += written
            self._unseen += written
            if self.used_bytes <= self._budget and self._unseen < self._budget // _UNSEEN:
                return
            self._unseen = 0
            self.used_bytes = self._evict()

    def _evict(self) -> int:
        """Returns how many bytes the folder then holds. Where another process is evicting, that is left to it."""
        found = [*self._files()]
        used = sum(size for _, size, _ in found)
        try:
            budget = min(self._budget, used + shutil.disk_usage(self.path).free // 2)
        except OSError:
            return used
        if used <= budget:
            return used
        try:
            with self._lock_file.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                chosen = victims(found, used - budget + int(_FREED * budget))
                for _, _, path in chosen:
                    _remove(Path(path))
                self._worths.floor = max(self._worths.floor, chosen[-1][0])
                _set_worth(self._lock_file, self._worths.floor)
        except OSError:  # held by another process, or the folder is gone
            return used
        self.counts["evicted"] += len(chosen)
        return used - sum(size for _, size, _ in chosen)

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """(worth, bytes, path) of all of them."""
        for folder in (*self.path.glob("*/??"), self.path / "blocks", self.path / "packed"):
            for entry in _entries(folder):
                try:
                    stat = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if not entry.name.startswith(_NEW):
                    yield stat.st_mtime, stat.st_blocks * 512, entry.path
                elif time.time() - stat.st_ctime > _LEFTOVER_S:
                    _remove(Path(entry.path))


def _entries(folder: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:
        return ()


def _set_worth(path: Path, worth: float) -> None:
    try:
        os.utime(path, (worth, worth))
    except OSError:
        return  # evicted meanwhile, or another user's


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s can't be deleted: %s", path, error.strerror)
