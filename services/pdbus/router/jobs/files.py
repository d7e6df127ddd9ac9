"""Files of requests, in pieces in a log: whole, or not there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Final

from pdbus.bus.stream_configs import JOBS_KEPT_S
from pdbus.context import LONGEST_DEADLINE_S, new_id
from pdbus.errors import InvalidRequest, NotFound, PdbusError, QuotaExceeded
from pdbus.messages.jobs import FileEntry, FileMeta
from pdbus.router.jobs.durable import Durable, last_of_each
from pdbus.router.jobs.shares import Shares
from pdbus.subjects import ANY, FILES

MOST_FILE_BYTES: Final = 100 << 20
MOST_FILES: Final = 1000
"""Of one tenant."""
LEAST_KEPT_S: Final = 3600
_PIECE_BYTES = 512 << 10
_SOON_S = 60.0
"""Before its pieces are gone, the first ones first, a file counts as expired."""


class FileStore:
    """Raises Unavailable while JetStream is away, Overloaded where it has no room."""

    def __init__(self, logs: Durable, shares: Shares, now: Callable[[], float] = time.time) -> None:
        self._logs, self._shares, self._now = logs, shares, now

    @asynccontextmanager
    async def upload(self, tenant: str, name: str) -> AsyncIterator[Upload]:
        """What is not finished when it is left leaves nothing. Raises QuotaExceeded."""
        there = await self._logs.counts(FILES(tenant=tenant, file=ANY))
        if sum(count > 1 for count in there.values()) >= MOST_FILES:  # a deleted one is a mark alone
            raise QuotaExceeded(f"{MOST_FILES} files are kept: delete some")
        upload = Upload(self._logs, self._shares, self._now, tenant, name)
        try:
            yield upload
        finally:
            await upload.close()

    async def of(self, tenant: str) -> list[FileMeta]:
        """All that are whole, in no order. What a router left that ended in the middle of an upload is removed."""
        found: list[FileMeta] = []
        for name, record in await last_of_each(self._logs, FILES(tenant=tenant, file=ANY)):
            whole, deleted = record.entry.whole, record.entry.deleted
            if whole and not deleted and self._lives(whole):
                found.append(whole)
            elif not deleted and (whole or record.time_ns / 1e9 + 2 * LONGEST_DEADLINE_S < self._now()):
                tokens = FILES.tokens(name)
                assert tokens is not None
                await self._logs.append(FILES(**tokens), FileEntry(whole=whole, deleted=True), replaces=True)
        return found

    async def meta(self, tenant: str, id_: str) -> FileMeta:
        """Raises NotFound, also for what is another's."""
        found = await self.ever(tenant, id_)
        if found is None or found[1] or not self._lives(found[0]):
            raise _none(id_)
        return found[0]

    async def ever(self, tenant: str, id_: str) -> tuple[FileMeta, bool] | None:
        """What is known of a file that was whole once, and whether it is deleted."""
        if not 0 < len(id_) <= 128 or not (last := await self._logs.last(FILES(tenant=tenant, file=id_))):
            return None
        return None if last.entry.whole is None else (last.entry.whole, last.entry.deleted)

    async def content(self, tenant: str, id_: str) -> AsyncGenerator[bytes, None]:
        """Raises NotFound, also when it is deleted, or expires, while it is read: never a part for the whole."""
        to, after, read = FILES(tenant=tenant, file=id_), 0, 0
        while record := await self._logs.next(to, after):
            entry = record.entry
            if entry.deleted or entry.at != read:
                break
            if entry.whole:
                return
            yield entry.data
            read += len(entry.data)
            after = record.seq
        raise _none(id_)

    async def delete(self, tenant: str, id_: str) -> None:
        """Its content is gone at once. Raises NotFound."""
        mark = FileEntry(whole=await self.meta(tenant, id_), deleted=True)
        await self._logs.append(FILES(tenant=tenant, file=id_), mark, replaces=True)

    def _lives(self, meta: FileMeta) -> bool:
        return self._now() < meta.expires_s


class Upload:
    """A file that comes."""

    def __init__(self, logs: Durable, shares: Shares, now: Callable[[], float], tenant: str, name: str) -> None:
        self._logs, self._shares, self._now = logs, shares, now
        self._tenant = tenant
        self._made_s = now()
        """Before its first piece, which is the first to be gone."""
        self._meta = FileMeta(f"file-{new_id()}", name, "", 0, self._made_s, self._made_s + JOBS_KEPT_S - _SOON_S)
        self._to = FILES(tenant=tenant, file=self._meta.id)
        self._size = 0
        self._finished = False

    async def add(self, content: AsyncIterable[bytes]) -> None:
        """Stores it as it comes. Raises InvalidRequest for too much, QuotaExceeded."""
        async for piece in _pieces(content):
            at, self._size = self._size, self._size + len(piece)
            if self._size > MOST_FILE_BYTES:
                raise InvalidRequest(f"a file has {MOST_FILE_BYTES} bytes at most", param="file")
            with self._shares.hold(self._tenant, len(piece)):
                await self._logs.append(self._to, FileEntry(piece, at=at))

    async def finish(self, purpose: str, kept_s: float | None = None) -> FileMeta:
        """Then it is there. `kept_s`: for how long; None: as long as anything is. Raises InvalidRequest for nothing."""
        if not self._size:
            raise InvalidRequest("the file is empty", param="file")
        expires_s = self._meta.expires_s if kept_s is None else min(self._made_s + kept_s, self._meta.expires_s)
        meta = replace(self._meta, purpose=purpose, bytes=self._size, expires_s=expires_s)
        await self._logs.append(self._to, FileEntry(whole=meta, at=self._size))
        self._finished = True
        return meta

    async def close(self) -> None:
        if self._size and not self._finished:
            with suppress(PdbusError):  # `of` removes it later
                await asyncio.shield(self._logs.append(self._to, FileEntry(deleted=True), replaces=True))


def _none(id_: str) -> NotFound:
    return NotFound(f"there is no file {id_[:128]!r}", param="id")


async def _pieces(content: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    waiting = bytearray()
    async for part in content:
        waiting += part
        while len(waiting) >= _PIECE_BYTES:
            yield bytes(waiting[:_PIECE_BYTES])
            del waiting[:_PIECE_BYTES]
    if waiting:
        yield bytes(waiting)
