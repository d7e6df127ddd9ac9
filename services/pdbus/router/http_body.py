"""The body of a request: read whole within its bounds, or refused before more of it is taken; and what becomes of
the connection then."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web

from pdbus.errors import InvalidRequest

BODY_S = 30.0
"""How long a client may take to send a body."""
_SOON_BYTES = 1 << 20
"""A body as large arrives while aiohttp still takes what follows an answer (10 s)."""
_GZIP = 16 + zlib.MAX_WBITS


async def read_body(http: web.Request) -> bytes:
    """The plain bytes, at most the application's `client_max_size` of them, also after unpacking.

    aiohttp must not unpack by itself: it would go on unpacking what it throws away, a bomb's whole content included.
    Raises InvalidRequest for broken gzip; HTTP errors 408 (too slow), 413 (too large), 415 (other encodings)."""
    most = http.client_max_size
    if (http.content_length or 0) > most:
        raise web.HTTPRequestEntityTooLarge(most, http.content_length or 0)
    encoding = http.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", "gzip"):
        raise web.HTTPUnsupportedMediaType(
            text=f"Content-Encoding {encoding[:32]!r} is not supported: gzip is, or none"
        )
    try:
        if http.content.is_eof():  # as most are by the time that their head is read
            body = await http.read()
        else:
            async with asyncio.timeout(BODY_S):
                body = await http.read()
    except web.RequestPayloadError:
        raise InvalidRequest("the body broke off, or is not cut into chunks as its head says") from None
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not arrive within {BODY_S:g} s") from None
    return body if encoding == "identity" else _unzip(body, most)


async def closing_told(http: web.Request, response: web.StreamResponse) -> None:
    """Before the head of an answer leaves: says in it that the connection closes, where it will (RFC 9112, 9.6).

    After an answer that did not wait for the body's end aiohttp takes the rest of it for a while, so that no reset
    overtakes the answer, and closes where the end does not come. A client that keeps its connections has to know,
    or its next request meets a closed one."""
    if response.keep_alive and not http.content.is_eof() and not _ends_soon(http, response.status):
        response.force_close()
        response.headers["Connection"] = "close"  # aiohttp has written its own by now


def _ends_soon(http: web.Request, status: int) -> bool:
    broken = http.content.exception() is not None or status == 408
    return not broken and http.content_length is not None and http.content_length <= _SOON_BYTES


def _unzip(body: bytes, most: int) -> bytes:
    unpack = zlib.decompressobj(_GZIP)
    try:
        plain = unpack.decompress(body, most + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is no gzip, as its Content-Encoding says: {error}") from None
    if len(plain) > most:
        raise web.HTTPRequestEntityTooLarge(most, len(plain))
    if not unpack.eof:
        raise InvalidRequest("the gzip body ends too early")
    return plain
