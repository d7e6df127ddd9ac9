"""Files of requests, in pieces in a log: whole, or not there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Final

from pdbus.bus.stream_configs import JOBS_KEPT_S
from pdbus.context import new_id
from pdbus.errors import InvalidRequest, NotFound
from pdbus.messages.jobs import FileEntry, FileMeta
from pdbus.router.jobs.durable import Durable
from pdbus.subjects import FILES

MOST_FILE_BYTES: Final = 100 << 20
_PIECE_BYTES = 512 << 10


class FileStore:
    """Raises Unavailable while JetStream is away, Overloaded where it has no room."""

    def __init__(self, logs: Durable, now: Callable[[], float] = time.time) -> None:
        self._logs = logs
        self._now = now

    async def put(self, tenant: str, name: str, purpose: str, content: AsyncIterable[bytes]) -> FileMeta:
        """Stores it as it comes. What breaks off leaves nothing. Raises InvalidRequest for too much, or nothing."""
        id_, size = f"file-{new_id()}", 0
        to = FILES(tenant=tenant, file=id_)
        try:
            async for piece in _pieces(content):
                size += len(piece)
                if size > MOST_FILE_BYTES:
                    raise InvalidRequest(f"a file has {MOST_FILE_BYTES} bytes at most", param="file")
                await self._logs.append(to, FileEntry(piece))
            if not size:
                raise InvalidRequest("the file is empty", param="file")
            now = self._now()
            meta = FileMeta(id_, name, purpose, size, now, now + JOBS_KEPT_S)
            await self._logs.append(to, FileEntry(whole=meta))
        except BaseException:
            if size:
                await asyncio.shield(self._logs.append(to, FileEntry(deleted=True), replaces=True))
            raise
        return meta

    async def meta(self, tenant: str, id_: str) -> FileMeta:
        """Raises NotFound, also for what is another's."""
        if 0 < len(id_) <= 128 and (last := await self._logs.last(FILES(tenant=tenant, file=id_))) and last.entry.whole:
            return last.entry.whole
        raise NotFound(f"there is no file {id_[:128]!r}", param="id")

    async def content(self, tenant: str, id_: str) -> AsyncGenerator[bytes, None]:
        """Raises NotFound, also when it is deleted while it is read."""
        to, after = FILES(tenant=tenant, file=id_), 0
        while record := await self._logs.next(to, after):
            if record.entry.whole:
                return
            if record.entry.deleted:
                break
            yield record.entry.data
            after = record.seq
        raise NotFound(f"there is no file {id_[:128]!r}", param="id")

    async def delete(self, tenant: str, id_: str) -> None:
        """Its content is gone at once. Raises NotFound."""
        await self.meta(tenant, id_)
        await self._logs.append(FILES(tenant=tenant, file=id_), FileEntry(deleted=True), replaces=True)


async def _pieces(content: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    waiting = bytearray()
    async for part in content:
        waiting += part
        while len(waiting) >= _PIECE_BYTES:
            yield bytes(waiting[:_PIECE_BYTES])
            del waiting[:_PIECE_BYTES]
    if waiting:
        yield bytes(waiting)
