"""/v1/files: what batches are made of, and what comes out of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from aiohttp import BodyPartReader, web

from pdbus.context import LONGEST_DEADLINE_S
from pdbus.errors import InvalidRequest
from pdbus.messages.jobs import FileMeta
from pdbus.router.http_caller import IDENTITY
from pdbus.router.jobs.batches import Batches
from pdbus.router.jobs.files import MOST_FILE_BYTES
from pdbus.router.jobs.openai_jobs import FileDeleted, file

_SLACK_BYTES = 64 << 10
"""Of a form, beside the file."""
_MOST_PARTS = 8
_FIELD_BYTES = 256
_READ_BYTES = 64 << 10
_NAME = 256


class HttpFiles:
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/files", self._upload),
            web.get("/v1/files/{id}", self._file),
            web.delete("/v1/files/{id}", self._delete),
            web.get("/v1/files/{id}/content", self._content),
        ]

    async def _upload(self, http: web.Request) -> web.Response:
        """Stored as it arrives: memory holds a piece of it."""
        if (http.content_length or 0) > MOST_FILE_BYTES + _SLACK_BYTES:
            raise web.HTTPRequestEntityTooLarge(MOST_FILE_BYTES, http.content_length or 0)
        if not http.content_type.startswith("multipart/form-data"):
            raise web.HTTPUnsupportedMediaType(text="a file is sent as multipart/form-data")
        if "Content-Encoding" in http.headers:
            raise web.HTTPUnsupportedMediaType(text="a file is sent as it is, without Content-Encoding")
        try:
            async with asyncio.timeout(LONGEST_DEADLINE_S):
                return _json(file(await self._stored(http)))
        except (ValueError, web.RequestPayloadError):
            raise InvalidRequest("the form broke off, or is none as its head says") from None

    async def _stored(self, http: web.Request) -> FileMeta:
        stored: FileMeta | None = None
        purpose = ""
        form, parts = await http.multipart(), 0
        try:
            while (part := await form.next()) is not None:
                parts += 1
                if not isinstance(part, BodyPartReader) or parts > _MOST_PARTS:
                    raise InvalidRequest("the form has more in it than a file and its purpose")
                if part.name == "file" and stored is None:
                    name = (part.filename or "file.jsonl")[:_NAME]
                    async with aclosing(_content(part)) as content:
                        stored = await self._batches.upload(http[IDENTITY], name, "batch", content)
                else:
                    value = await _field(part)
                    purpose = value if part.name == "purpose" else purpose
            if stored is None:
                raise InvalidRequest("there is no file in the form", param="file")
            if purpose != "batch":
                raise InvalidRequest("the purpose of a file is 'batch': nothing else is served", param="purpose")
        except BaseException:
            if stored is not None:
                await asyncio.shield(self._batches.delete(http[IDENTITY].tenant, stored.id))
            raise
        return stored

    async def _file(self, http: web.Request) -> web.Response:
        return _json(file(await self._batches.file(http[IDENTITY].tenant, http.match_info["id"])))

    async def _delete(self, http: web.Request) -> web.Response:
        await self._batches.delete(http[IDENTITY].tenant, http.match_info["id"])
        return _json(FileDeleted(id=http.match_info["id"]))

    async def _content(self, http: web.Request) -> web.StreamResponse:
        tenant, id_ = http[IDENTITY].tenant, http.match_info["id"]
        meta = await self._batches.file(tenant, id_)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = meta.bytes
        try:
            async with asyncio.timeout(LONGEST_DEADLINE_S), aclosing(self._batches.content(tenant, id_)) as content:
                await response.prepare(http)
                async for piece in content:
                    await response.write(piece)
                await response.write_eof()
        except Exception:
            if http.transport is not None:
                http.transport.abort()  # the length that was told is missed: the client sees that it is not all
        return response


async def _content(part: BodyPartReader) -> AsyncGenerator[bytes, None]:
    while piece := await part.read_chunk(_READ_BYTES):
        yield piece


async def _field(part: BodyPartReader) -> str:
    value = b""
    async with aclosing(_content(part)) as content:
        async for piece in content:
            value += piece
            if len(value) > _FIELD_BYTES:
                raise InvalidRequest("a field of the form is too long", param=(part.name or "")[:64])
    return value.decode("utf-8", "replace")


def _json(content: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")
