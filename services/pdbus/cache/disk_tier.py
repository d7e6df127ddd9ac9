"""The disk behind a cache node's memory: written to in the background, read in threads, deleted from at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from pdbus.caching.disk import DiskStore
from pdbus.caching.disk_entry import DiskEntry
from pdbus.caching.entry import Entry
from pdbus.context import Deadline
from pdbus.errors import Corrupt
from pdbus.telemetry.spans import meter

log = logging.getLogger(__name__)

_WAITING_BYTES = 32 << 20
"""Of entries on their way to the disk that have left the memory; more are given up."""
_CALM_S = 0.1
"""So long after a read nothing is written, as long as there is room for what waits: whoever reads is in a hurry."""
_BROKEN_S = 30.0
"""After a failed write nothing is written for so long."""


class DiskTier:
    """The tier below a Store (caching/store.py): pages of KV that it has read or gives up. Each is written once."""

    def __init__(self, disk: DiskStore) -> None:
        self.disk = disk
        self._waiting: dict[bytes, Entry] = {}
        self._left: dict[bytes, int] = {}
        """Bytes of those waiting that have left the memory."""
        self._read_s = 0.0
        """When the memory or the disk was read last."""
        self._draining = False
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._broken_until_s = 0.0
        self._reads = meter().create_counter("pdbus.cache.disk.reads", unit="{entry}")
        self._writes = meter().create_counter("pdbus.cache.disk.writes", unit="{entry}")

    async def __aenter__(self) -> Self:
        try:
            await asyncio.to_thread(self.disk.open)
        except OSError as error:
            log.warning("the node has no disk tier: %s", error)
            self._broken_until_s = float("inf")
        self._task = asyncio.create_task(self._write_all())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # As the memory above sees it

    def offer(self, entry: Entry, *, given_up: bool) -> None:
        if not given_up:
            self._read_s = time.monotonic()
        if entry.kind != "kv" or entry.name:
            return
        if entry.key in self.disk:
            self.disk.adopt(entry.key, entry.root)  # so that it outlives the root that it was written under
            return
        if entry.key not in self._waiting:
            if time.monotonic() < self._broken_until_s or not self.disk.fits(entry):
                return
            self._waiting[entry.key] = entry
            self._news.set()
        if given_up:
            self._left[entry.key] = len(entry.value)
            if sum(self._left.values()) > _WAITING_BYTES:
                self._take_back(entry.key)
                self._writes.add(1, {"outcome": "dropped"})

    def delete(self, keys: Iterable[bytes]) -> int:
        keys = tuple(keys)
        deleted = sum(self._take_back(key) for key in keys if key in self._waiting) + self.disk.delete(keys)
        self._news.set()
        return deleted

    def delete_root(self, root: bytes) -> int:
        waiting = [key for key, entry in self._waiting.items() if entry.root == root]
        deleted = sum(self._take_back(key) for key in waiting) + self.disk.delete_root(root)
        self._news.set()
        return deleted

    def clear(self) -> None:
        self._waiting.clear()
        self._left.clear()
        self.disk.clear()

    # As the node sees it

    def expire(self, now_s: float) -> None:
        if self.disk.expire(now_s):
            self._news.set()

    def expect(self, entry: DiskEntry) -> None:
        """It will be read soon: the system brings it meanwhile."""
        self._read_s = time.monotonic()
        entry.segment.will_need(entry.offset, entry.head)

    async def read(self, entries: Sequence[DiskEntry]) -> list[bytes | None]:
        """Their values as stored. None where one is damaged: it is deleted then, or was meanwhile."""
        found: list[bytes | None] = []
        for entry, value in zip(entries, await asyncio.to_thread(_copied, self.disk, entries), strict=True):
            if isinstance(value, Corrupt):
                log.warning("%s: it is given up", value.message)
                if not entry.void:
                    self.disk.delete([entry.key])
                self._reads.add(1, {"outcome": "damaged"})
                found.append(None)
            else:
                self._reads.add(1, {"outcome": "hit"})
                found.append(None if entry.void else value)
        return found

    async def drain(self, deadline: Deadline) -> None:
        """Returns when nothing waits to be written, or the deadline passes."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with deadline.timeout():
                while self._waiting or self._news.is_set():
                    self._idle.clear()
                    await self._idle.wait()
        self._draining = False

    def _take_back(self, key: bytes) -> int:
        del self._waiting[key]
        self._left.pop(key, None)
        return 1

    async def _calm(self) -> None:
        """Returns when nothing was read for a moment, or what waits has to go."""
        while not self._draining and not self._left:
            wait_s = self._read_s + _CALM_S - time.monotonic()
            if wait_s <= 0:
                return
            await asyncio.sleep(wait_s)

    async def _write_all(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                await self._calm()
                if not self._waiting:  # deleted meanwhile
                    break
                key = next(iter(self._left or self._waiting))
                entry = self._waiting[key]
                await self._keep(entry)
                if self._waiting.get(key) is entry:
                    self._take_back(key)
            if unmarked := self.disk.unmarked():
                await asyncio.to_thread(self.disk.sweep, unmarked)
            self._idle.set()

    async def _keep(self, entry: Entry) -> None:
        try:
            placed = self.disk.begin(entry)
            if placed is None:
                await self._make_room()
                placed = self.disk.begin(entry)
            stored = placed is not None and await self._write(placed, entry.value)
            self._writes.add(1, {"outcome": "stored" if stored else "dropped"})
        except OSError as error:
            self._writes.add(1, {"outcome": "failed"})
            self._broken_until_s = time.monotonic() + _BROKEN_S
            log.warning("nothing goes to the disk for %.0f s: %s", _BROKEN_S, error)

    async def _write(self, placed: DiskEntry, value: bytes) -> bool:
        written = False
        try:
            await asyncio.to_thread(self.disk.write, placed, value)
            written = True
        finally:
            stored = self.disk.commit(placed, written)
        return stored

    async def _make_room(self) -> None:
        """Gives up the oldest segment, but for what was read since it was written."""
        try:
            for entry in self.disk.retire():
                [value] = await self.read([entry])
                if value is None or entry.void:
                    continue
                placed = self.disk.begin(entry.with_value(value))
                if placed is not None:
                    await self._write(placed, value)
        finally:
            self.disk.remove_retired()


def _copied(disk: DiskStore, entries: Sequence[DiskEntry]) -> list[bytes | Corrupt]:
    """In a thread: the map's pages come from the disk as they are touched."""
    found: list[bytes | Corrupt] = []
    for entry in entries:
        try:
            found.append(bytes(disk.read(entry)))
        except Corrupt as error:
            found.append(error)
    return found
