"""/v1/files: what batches are made of, and what comes out of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager

import msgspec
from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from pdbus.bus.stream_configs import JOBS_KEPT_S
from pdbus.context import LONGEST_DEADLINE_S
from pdbus.errors import InvalidRequest, NotFound, PdbusError
from pdbus.messages.jobs import FileMeta
from pdbus.router.http_caller import IDENTITY
from pdbus.router.jobs.batches import Batches, FilesWanted
from pdbus.router.jobs.files import LEAST_KEPT_S, MOST_FILE_BYTES, Upload
from pdbus.router.jobs.http_jobs import number, whole_number
from pdbus.router.jobs.openai_jobs import FileDeleted, FileList, file

log = logging.getLogger(__name__)

MOST_FILES_LISTED = 10_000
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
            web.get("/v1/files", self._list),
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
        async with asyncio.timeout(LONGEST_DEADLINE_S):
            return _json(file(await self._stored(http)))

    async def _stored(self, http: web.Request) -> FileMeta:
        fields: dict[str, str] = {}
        with _reading():
            form, parts = await http.multipart(), 0
        upload: Upload | None = None
        async with AsyncExitStack() as stack:
            while (part := await _next(form)) is not None:
                parts += 1
                if not isinstance(part, BodyPartReader) or parts > _MOST_PARTS:
                    raise InvalidRequest("the form has more in it than a file and what is said of it")
                if part.name == "file" and upload is None:
                    name, size = (part.filename or "file.jsonl")[:_NAME], http.content_length or 0
                    upload = await stack.enter_async_context(self._batches.upload(http[IDENTITY], name, size))
                    async with aclosing(_content(part)) as content:
                        await upload.add(content)
                else:
                    fields[part.name or ""] = await _field(part)
            if upload is None:
                raise InvalidRequest("there is no file in the form", param="file")
            if fields.get("purpose") != "batch":
                raise InvalidRequest("the purpose of a file is 'batch': nothing else is served", param="purpose")
            return await upload.finish("batch", _kept_s(fields))

    async def _list(self, http: web.Request) -> web.Response:
        order = http.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order is asc or desc", param="order")
        limit = number(http, "limit", 1, MOST_FILES_LISTED, MOST_FILES_LISTED)
        wanted = FilesWanted(limit, http.query.get("purpose"), http.query.get("after"), order == "desc")
        found, more = await self._batches.files(http[IDENTITY].tenant, wanted)
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return _json(FileList(data=list(map(file, found)), first_id=first, last_id=last, has_more=more))

    async def _file(self, http: web.Request) -> web.Response:
        return _json(file(await self._batches.file(http[IDENTITY].tenant, http.match_info["id"])))

    async def _delete(self, http: web.Request) -> web.Response:
        await self._batches.delete(http[IDENTITY].tenant, http.match_info["id"])
        return _json(FileDeleted(id=http.match_info["id"]))

    async def _content(self, http: web.Request) -> web.StreamResponse:
        """The status waits for the first piece: until then an error is an ordinary one; later the answer breaks off."""
        tenant, id_ = http[IDENTITY].tenant, http.match_info["id"]
        meta = await self._batches.file(tenant, id_)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = meta.bytes
        try:
            async with asyncio.timeout(LONGEST_DEADLINE_S), aclosing(self._batches.content(tenant, id_)) as content:
                written = 0
                async for piece in content:
                    if not response.prepared:
                        await response.prepare(http)
                    await response.write(piece)
                    written += len(piece)
                    if written >= meta.bytes:  # whole for its client, whatever becomes of the file from here on
                        break
                if written != meta.bytes:
                    raise NotFound("it was deleted while it was read")
                await response.write_eof()
        except Exception as error:
            if not response.prepared:
                raise
            level = logging.INFO if isinstance(error, PdbusError | TimeoutError | ConnectionError) else logging.ERROR
            log.log(level, "the content of file %s broke off: %s", meta.id, error)
            if http.transport is not None:
                http.transport.abort()  # the length that was told is missed: the client sees that it is not all
        return response


def _kept_s(fields: dict[str, str]) -> float | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest("the anchor is created_at", param="expires_after[anchor]")
    return float(whole_number("expires_after[seconds]", seconds or "", LEAST_KEPT_S, JOBS_KEPT_S))


@contextmanager
def _reading() -> Iterator[None]:
    """A form that is none makes aiohttp's reader raise all of these, which elsewhere would be faults of ours."""
    try:
        yield
    except (ValueError, AssertionError, RuntimeError, HttpProcessingError, web.RequestPayloadError):
        raise InvalidRequest("the form broke off, or is none as its head says") from None


async def _next(form: MultipartReader) -> BodyPartReader | MultipartReader | None:
    with _reading():
        return await form.next()


async def _content(part: BodyPartReader) -> AsyncGenerator[bytes, None]:
    while True:
        with _reading():
            piece = await part.read_chunk(_READ_BYTES)
        if not piece:
            return
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
