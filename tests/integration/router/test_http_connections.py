"""A connection after an answer that did not wait for the body: kept, or the answer says that it is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from loadtest.fuzz.http_wire import Reply, read_reply
from pdbus import keyfile
from pdbus.router.jobs.files import FileStore
from tests.support.router_rig import rig

LARGE = 8 << 20
"""More than sockets hold: a client that reads after all is sent needs somebody to take it."""
SMALL = b"x" * 3000
TYPES = b"Content-Type: application/json"
FORM = b"Content-Type: multipart/form-data; boundary=b"
HELLO = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


class Wire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self._reader, self._writer, self._key = reader, writer, key

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, line: bytes, *headers: bytes) -> None:
        key = f"Authorization: Bearer {self._key}".encode()
        own = () if any(header.startswith(b"Authorization") for header in headers) else (key,)
        await self.send(b"\r\n".join((line + b" HTTP/1.1", b"Host: x", *own, *headers, b"", b"")))

    async def answer(self) -> Reply:
        return await read_reply(self._reader)

    async def goes_on(self, reply: Reply) -> None:
        """As `reply` said, once all of its request is sent."""
        if reply.closes:
            assert await self._reader.read() == b""
        else:
            await self.send(HELLO)
            assert (await self.answer()).status == 200


Dial = Callable[[], AbstractAsyncContextManager[Wire]]


@pytest.fixture
async def dial(nats_url: str, unique: Callable[[str], str], tmp_path: Path) -> AsyncIterator[Dial]:
    file = tmp_path / "keys.json"
    key = keyfile.add(file, unique("t")).text
    async with rig(nats_url=nats_url, model=unique("wire"), keys_file=file, max_body_bytes=2048) as r:

        @asynccontextmanager
        async def dialled() -> AsyncIterator[Wire]:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(r.url.rpartition(":")[2]))
            try:
                async with asyncio.timeout(60):
                    yield Wire(reader, writer, key)
            finally:
                writer.transport.abort()

        yield dialled


EARLY = {
    "too large": (b"POST /v1/completions", TYPES, 413),
    "a header that is none": (b"POST /v1/completions", b"X-Request-Timeout-Ms: x", 400),
    "who knows who": (b"POST /v1/completions", b"Authorization: Bearer x", 401),
    "no such path": (b"POST /nothing", TYPES, 404),
    "no such method": (b"PUT /v1/completions", TYPES, 405),
    "no form": (b"POST /v1/files", TYPES, 415),
    "a packed form": (b"POST /v1/files", FORM + b"\r\nContent-Encoding: gzip", 415),
    "a body where none is read": (b"GET /v1/files", TYPES, 200),
}


async def test_a_small_body_that_comes_later_costs_no_connection(dial: Dial) -> None:
    for what, (line, header, status) in EARLY.items():
        async with dial() as w:
            await w.head(line, header, b"Content-Length: %d" % len(SMALL))
            reply = await w.answer()
            assert (reply.status, reply.closes) == (status, False), what
            await w.send(SMALL)
            await w.goes_on(reply)


async def test_a_large_body_is_taken_to_its_end_and_the_answer_says_that_it_was_the_last(dial: Dial) -> None:
    chunk = b"%x\r\n%b\r\n" % (LARGE // 8, b"x" * (LARGE // 8))
    bodies = {
        b"Content-Length: %d" % LARGE: b"x" * LARGE,
        b"Transfer-Encoding: chunked": chunk * 8 + b"0\r\n\r\n",
    }
    for what, (line, header, status) in EARLY.items():
        for framing, body in bodies.items():
            async with dial() as w:
                await w.head(line, header, framing)
                await w.send(body)
                reply = await w.answer()
                assert (reply.status, reply.closes) == (status, True), (what, framing)
                await w.goes_on(reply)


async def test_after_chunks_that_are_none_nothing_is_answered(dial: Dial) -> None:
    for line in (b"POST /v1/completions", b"POST /v1/files", b"POST /nothing", b"GET /v1/files"):
        async with dial() as w:
            await w.head(line, FORM, b"Transfer-Encoding: chunked")
            await w.send(b"zz\r\n")
            reply = await w.answer()
            assert reply.closes, line
            await w.goes_on(reply)


async def test_a_body_that_did_not_come_in_time_is_not_waited_for_any_more(
    dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdbus.router.http_body.BODY_S", 0.01)
    async with dial() as w:
        await w.head(b"POST /v1/completions", TYPES, b"Content-Length: 10")
        reply = await w.answer()
        assert (reply.status, reply.closes) == (408, True)


async def test_a_form_that_is_none(dial: Dial) -> None:
    form = b"--b\r\nno colon\r\n\r\n"
    for size in (len(SMALL), LARGE):
        async with dial() as w:
            await w.head(b"POST /v1/files", FORM, b"Content-Length: %d" % (len(form) + size))
            await w.send(form + b"x" * size)
            reply = await w.answer()
            assert reply.status == 400
            assert reply.closes == (size == LARGE)
            await w.goes_on(reply)


async def test_a_file_deleted_while_it_is_read_breaks_off_unless_all_of_it_was_sent(
    dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FileStore.content

    async def deleted_meanwhile(self: FileStore, tenant: str, id_: str) -> AsyncGenerator[bytes, None]:
        gone = False
        async for piece in read(self, tenant, id_):
            if not gone:
                await self.delete(tenant, id_)
                gone = True
            yield piece

    monkeypatch.setattr("pdbus.router.jobs.files._PIECE_BYTES", 4)
    monkeypatch.setattr(FileStore, "content", deleted_meanwhile)
    async with dial() as w:
        await w.head(b"GET /v1/files/%b/content" % await _stored(w, b"1234"))
        reply = await w.answer()
        assert (reply.body, reply.closes) == (b"1234", False)
        await w.goes_on(reply)
        await w.head(b"GET /v1/files/%b/content" % await _stored(w, b"12345678"))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await w.answer()


async def test_a_file_deleted_before_any_of_it_is_sent_is_not_there(
    dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FileStore.content

    async def deleted_first(self: FileStore, tenant: str, id_: str) -> AsyncGenerator[bytes, None]:
        await self.delete(tenant, id_)
        async for piece in read(self, tenant, id_):
            yield piece

    monkeypatch.setattr(FileStore, "content", deleted_first)
    async with dial() as w:
        await w.head(b"GET /v1/files/%b/content" % await _stored(w, b"1234"))
        reply = await w.answer()
        assert (reply.status, reply.closes) == (404, False)
        await w.goes_on(reply)


async def _stored(w: Wire, content: bytes) -> bytes:
    """Its id."""
    part = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    form = part % (b"purpose", b"", b"batch") + part % (b"file", b'; filename="x"', content) + b"--b--\r\n"
    await w.head(b"POST /v1/files", FORM, b"Content-Length: %d" % len(form))
    await w.send(form)
    made = await w.answer()
    assert made.status == 200, made
    return bytes(json.loads(made.body)["id"].encode())
