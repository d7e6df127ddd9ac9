"""The least of an HTTP client: whatever bytes are given are sent, and what comes back is read as it should be."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

_MOST = 16 << 20


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    closes: bool
    """No further request is answered on this connection."""


class Connection:
    """One socket, opened again where the server closed it."""

    def __init__(self, host: str, port: int) -> None:
        self._at = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes, *, ends: bool) -> Reply | None:
        """`ends`: nothing follows, so that the server need not wait for more. None: it closed without an answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._at, limit=_MOST)
        reader, writer = self._streams
        reply = None
        try:
            writer.write(request)
            if ends:
                writer.write_eof()
            reply = await read_reply(reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            if reply is None or ends or reply.closes:
                self.close()
        return reply

    def close(self) -> None:
        if self._streams:
            self._streams[1].transport.abort()
            self._streams = None


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Raises IncompleteReadError, or ConnectionError, where it did not come whole."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ")[1])
        if status != 100:
            break
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    length = headers.get("content-length")
    if status == 204 or status == 304:
        body = b""
    elif headers.get("transfer-encoding") == "chunked":
        body = await _chunks(reader)
    else:
        body = await (reader.read(-1) if length is None else reader.readexactly(int(length)))
    closes = headers.get("connection", "keep-alive" if head[0].startswith("HTTP/1.1") else "close").lower() == "close"
    return Reply(status, headers, body, closes)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int((await reader.readuntil(b"\r\n")), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return body
