"""Jobs, batches and files as HTTP tells them, the latter two by OpenAI's objects. The OpenAPI document has these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pdbus.messages.jobs import BatchState, BatchUsage, FileMeta, JobStatus, JobTold
from pdbus.router.jobs.lines import PATHS
from pdbus.router.jobs.told import MOST_METADATA

Path = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=MOST_METADATA)
]


class JobBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/jobs. `body`: what the endpoint takes."""

    endpoint: Path
    body: dict[str, Any]
    metadata: Metadata | None = None


class JobResponse(Struct, frozen=True):
    status_code: int
    body: msgspec.Raw
    """What the endpoint answers: an object of it, or an error."""


class Job(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["job"] = "job"
    endpoint: Path
    status: JobStatus
    created_at: int
    expires_at: int
    ended_at: int | None
    tokens: int
    """Of the answer: those that are there so far."""
    metadata: dict[str, str]
    response: JobResponse | None
    """Once it is completed, or failed."""


class ExpiresAfter(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=86_400)]


class BatchBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=128)]
    endpoint: Path
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class RequestCounts(Struct, frozen=True):
    total: int
    completed: int
    failed: int


class InputDetails(Struct, frozen=True):
    cached_tokens: int


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: Literal[0] = 0


class BatchUsageOut(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()


class BatchErrorOut(Struct, frozen=True):
    code: str
    message: str
    line: int | None
    param: str | None = None


class BatchErrors(Struct, frozen=True):
    data: list[BatchErrorOut]
    object: Literal["list"] = "list"


class Batch(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: Path
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    usage: BatchUsageOut


class BatchList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class File(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def job(told: JobTold) -> Job:
    return Job(
        id=told.id,
        endpoint=PATHS[told.endpoint],  # type: ignore[arg-type]
        status=told.status,
        created_at=int(told.created_s),
        expires_at=int(told.expires_s),
        ended_at=_whole(told.ended_s),
        tokens=told.tokens,
        metadata=told.metadata,
        response=JobResponse(told.status_code, msgspec.Raw(told.data)) if told.status_code else None,
    )


def batch(state: BatchState) -> Batch:
    at = state.since_s
    errors = [BatchErrorOut(error.code, error.message, error.line) for error in state.errors]
    out, bad = output_file(state), error_file(state)
    return Batch(
        id=state.id,
        endpoint=PATHS[state.endpoint],  # type: ignore[arg-type]
        errors=BatchErrors(errors) if errors else None,
        input_file_id=state.input_file,
        status=state.status,
        output_file_id=out.id if out else None,
        error_file_id=bad.id if bad else None,
        created_at=int(state.created_s),
        in_progress_at=_whole(at.get("in_progress")),
        expires_at=int(state.expires_s),
        finalizing_at=_whole(at.get("finalizing")),
        completed_at=_whole(at.get("completed")),
        failed_at=_whole(at.get("failed")),
        expired_at=_whole(at.get("expired")),
        cancelling_at=_whole(at.get("cancelling")),
        cancelled_at=_whole(at.get("cancelled")),
        request_counts=RequestCounts(state.total, state.completed, state.failed),
        metadata=state.metadata or None,
        usage=_usage(state.usage),
    )


def _usage(used: BatchUsage) -> BatchUsageOut:
    total = used.input_tokens + used.output_tokens
    return BatchUsageOut(used.input_tokens, InputDetails(used.cached_tokens), used.output_tokens, total)


def file(meta: FileMeta) -> File:
    return File(
        id=meta.id,
        bytes=meta.bytes,
        created_at=int(meta.created_s),
        expires_at=int(meta.expires_s),
        filename=meta.name,
        purpose="batch" if meta.purpose == "batch" else "batch_output",
    )


def output_file(state: BatchState) -> FileMeta | None:
    """The answers of a batch that has ended. None: there are none, or the file was deleted."""
    return _made(state, "output", state.output_bytes, deleted=state.output_deleted)


def error_file(state: BatchState) -> FileMeta | None:
    """What was not answered, as `output_file`."""
    return _made(state, "errors", state.error_bytes, deleted=state.errors_deleted)


def _made(state: BatchState, kind: str, size: int, *, deleted: bool) -> FileMeta | None:
    if not state.final or not size or deleted:
        return None
    at_s = state.since_s[state.status]
    name = f"{state.id}_{kind}.jsonl"
    return FileMeta(f"file-{state.id}-{kind}", name, "batch_output", size, at_s, at_s + state.output_kept_s)


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
