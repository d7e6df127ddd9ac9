"""Jobs, batches and files in the OpenAPI document."""

from __future__ import annotations

from typing import Any

import msgspec

from pdbus.router.jobs.files import MOST_FILE_BYTES
from pdbus.router.jobs.http_jobs import LONGEST_WAIT_S
from pdbus.router.jobs.openai_jobs import Batch, BatchBody, BatchList, File, FileDeleted, Job, JobBody

JOB_TYPES: tuple[type[msgspec.Struct], ...] = (Job, JobBody, Batch, BatchBody, BatchList, File, FileDeleted)
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    "description": "The same submission under the same key, for two days, is the same one",
}
_ALWAYS = ("400", "429", "500", "503")


def job_paths(ref: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    """`ref`: where the document has each type."""
    known, id_ = ("404",), _path("id")
    job, batch, file = ref[Job], ref[Batch], ref[File]
    return {
        "/v1/jobs": {
            "post": _operation("submitJob", "A request that must not be lost", job, *_SENT, body=ref[JobBody])
        },
        "/v1/jobs/{id}": {
            "parameters": [id_],
            "get": _operation("job", "Its state, and its result once there is one", job, *known, query=[_WAIT]),
            "delete": _operation("cancelJob", "Ends it, unless it has ended", job, *known),
        },
        "/v1/batches": {
            "post": _operation("createBatch", "Requests from a file", batch, "404", *_SENT, body=ref[BatchBody]),
            "get": _operation("batches", "The newest first", ref[BatchList], *known, query=_PAGE),
        },
        "/v1/batches/{id}": {"parameters": [id_], "get": _operation("batch", "Its state", batch, *known)},
        "/v1/batches/{id}/cancel": {
            "parameters": [id_],
            "post": _operation("cancelBatch", "What is answered stays; nothing more is begun", batch, "404", "409"),
        },
        "/v1/files": {"post": _upload(file)},
        "/v1/files/{id}": {
            "parameters": [id_],
            "get": _operation("file", "What is known of it", file, *known),
            "delete": _operation("deleteFile", "It is gone", ref[FileDeleted], *known),
        },
        "/v1/files/{id}/content": {
            "parameters": [id_],
            "get": _operation("fileContent", "Its bytes", {"type": "string"}, *known, media="application/octet-stream"),
        },
    }


_SENT = ("409", "408", "413", "415")
_WAIT = {
    "name": "wait",
    "in": "query",
    "required": False,
    "schema": {"type": "integer", "minimum": 0, "maximum": int(LONGEST_WAIT_S)},
    "description": "Seconds to wait for its end",
}
_PAGE = [
    {"name": "after", "in": "query", "required": False, "schema": {"type": "string"}, "description": "Those behind it"},
    {
        "name": "limit",
        "in": "query",
        "required": False,
        "schema": {"type": "integer", "minimum": 1, "maximum": 100},
        "description": "20 unless told",
    },
]


def _operation(
    name: str,
    text: str,
    answer: Any,
    *errors: str,
    body: Any = None,
    query: list[Any] | None = None,
    media: str = "application/json",
) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": name,
        "responses": {
            "200": {"description": text, "content": {media: {"schema": answer}}},
            **{status: {"$ref": f"#/components/responses/{status}"} for status in (*_ALWAYS, *errors)},
        },
    }
    if body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        made["parameters"] = [_KEY]
    if query:
        made["parameters"] = query
    return made


def _upload(file: Any) -> dict[str, Any]:
    made = _operation("uploadFile", f"JSONL, {MOST_FILE_BYTES} bytes at most", file, "408", "413", "415")
    form = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
    }
    made["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    return made


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "description": "Of its making"}
