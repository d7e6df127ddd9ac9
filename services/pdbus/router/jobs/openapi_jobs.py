"""Jobs, batches and files in the OpenAPI document."""

from __future__ import annotations

from typing import Any

import msgspec

from pdbus.bus.stream_configs import JOBS_KEPT_S
from pdbus.context import HIGHEST_PRIORITY
from pdbus.messages.jobs import JOB_PRIORITY
from pdbus.router.jobs.files import LEAST_KEPT_S, MOST_FILE_BYTES
from pdbus.router.jobs.http_files import MOST_FILES_LISTED
from pdbus.router.jobs.http_jobs import LISTED, LONGEST_WAIT_S, MOST_LISTED
from pdbus.router.jobs.openai_jobs import Batch, BatchBody, BatchList, File, FileDeleted, FileList, Job, JobBody

JOB_TYPES: tuple[type[msgspec.Struct], ...] = (Job, JobBody, Batch, BatchBody, BatchList, File, FileDeleted, FileList)
_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    "description": "The same submission under the same key, for two days, is the same one",
}
_PRIORITY = {
    "name": "X-Priority",
    "in": "header",
    "required": False,
    "schema": {"type": "integer", "minimum": 0, "maximum": HIGHEST_PRIORITY},
    "description": f"Higher ones go first ({JOB_PRIORITY} unless told; a key may have a lower limit)",
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
        "/v1/files": {
            "post": _upload(file),
            "get": _operation("files", "Of requests and of results", ref[FileList], *known, query=_FILES),
        },
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


def _query(name: str, schema: Any, text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": text}


def _page(most: int, usual: int) -> list[dict[str, Any]]:
    return [
        _query("after", {"type": "string"}, "Those behind it"),
        _query("limit", {"type": "integer", "minimum": 1, "maximum": most}, f"{usual} unless told"),
    ]


_WAIT = _query("wait", {"type": "integer", "minimum": 0, "maximum": int(LONGEST_WAIT_S)}, "Seconds to wait for its end")
_PAGE = _page(MOST_LISTED, LISTED)
_FILES = [
    *_page(MOST_FILES_LISTED, MOST_FILES_LISTED),
    _query("order", {"enum": ["asc", "desc"]}, "By when they were made; the newest first unless told"),
    _query("purpose", {"type": "string"}, "Only those of it: batch, or batch_output"),
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
        made["parameters"] = [_KEY, _PRIORITY]
    if query:
        made["parameters"] = query
    return made


def _upload(file: Any) -> dict[str, Any]:
    made = _operation("uploadFile", f"JSONL, {MOST_FILE_BYTES} bytes at most", file, "408", "413", "415")
    form = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"const": "batch"},
            "expires_after[anchor]": {"const": "created_at"},
            "expires_after[seconds]": {"type": "integer", "minimum": LEAST_KEPT_S, "maximum": JOBS_KEPT_S},
        },
    }
    made["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    return made


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "description": "Of its making"}
