"""Durable jobs: what callers ask of routers, what waits in the queue, and what the log of results holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pdbus.messages.common import Digest

JOB_PRIORITY: Final = 0
"""Unless more is asked for: the lowest, behind all who wait for an answer."""
JobEndpoint = Literal["chat.completions", "completions", "embeddings"]
JobStatus = Literal["queued", "running", "completed", "failed", "cancelled"]
FINAL: frozenset[JobStatus] = frozenset({"completed", "failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job, all but its body."""

    tenant: str
    id: str
    endpoint: JobEndpoint
    digest: Digest
    """Of endpoint and body: under one id there is one of each."""
    key_id: str
    """Of the API key that it was submitted with; empty where none is asked for."""
    created_s: float
    """Wall clock, as are all times here."""
    expires_s: float
    """Begun no later: then it has failed."""
    metadata: dict[str, str] = field(default_factory=dict)
    priority: int = JOB_PRIORITY


@dataclass(frozen=True, slots=True)
class JobWork:
    """In the queue, until the job's result is stored. May be there twice: the log decides."""

    spec: JobSpec
    body: bytes
    """JSON."""


@dataclass(frozen=True, slots=True)
class JobEntry:
    """In the log of results, whose last entry of a job is its state. Nothing follows a final one."""

    status: JobStatus
    """Accepted ones are "queued": that they run is told by events."""
    spec: JobSpec
    at_s: float
    status_code: int = 0
    """As HTTP would answer; 0 before the end, and where it was cancelled."""
    data: bytes = b""
    """JSON: the answer, or the error body."""
    tokens: int = 0
    """That were written for it."""

    @property
    def final(self) -> bool:
        return self.status in FINAL


@dataclass(frozen=True, slots=True)
class JobProgress:
    """May be lost, and may come late; the log is what counts."""

    tenant: str
    job: str
    status: str
    tokens: int = 0
    """Of the answer, so far."""


@dataclass(frozen=True, slots=True)
class JobSubmit:
    endpoint: JobEndpoint
    body: dict[str, Any]
    idempotency_key: str
    """The same submission under the same key, for two days, is the same job."""
    metadata: dict[str, str] = field(default_factory=dict)
    priority: int = JOB_PRIORITY


@dataclass(frozen=True, slots=True)
class JobWanted:
    id: str
    wait_s: float = 0.0
    """How long to wait for its end before telling its state."""


@dataclass(frozen=True, slots=True)
class JobTold:
    """The state of a job, and its result once there is one."""

    id: str
    status: JobStatus
    endpoint: JobEndpoint
    created_s: float
    expires_s: float
    ended_s: float | None = None
    tokens: int = 0
    status_code: int = 0
    data: bytes = b""
    """JSON, as in JobEntry."""
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def final(self) -> bool:
        return self.status in FINAL


@dataclass(frozen=True, slots=True)
class FileMeta:
    id: str
    name: str
    purpose: str
    bytes: int
    created_s: float
    expires_s: float


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file is its pieces in order, and then `whole`; without that it was never finished."""

    data: bytes = b""
    whole: FileMeta | None = None
    """Beside `deleted`: of the file that was there."""
    deleted: bool = False
    at: int = 0
    """Where in the file `data` begins."""


BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
BATCH_FINAL: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})


@dataclass(frozen=True, slots=True)
class BatchError:
    code: str
    message: str
    line: int | None = None
    """From 1."""


@dataclass(frozen=True, slots=True)
class BatchUsage:
    """Of all answers together, as each tells its own."""

    input_tokens: int = 0
    cached_tokens: int = 0
    """Of those, what did not have to be read again."""
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    tenant: str
    id: str
    key_id: str
    digest: Digest
    endpoint: JobEndpoint
    input_file: str
    created_s: float
    expires_s: float
    status: BatchStatus = "validating"
    since_s: dict[str, float] = field(default_factory=dict)
    """When it came into each status that it was in."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    output_deleted: bool = False
    errors_deleted: bool = False
    deliveries: int = 0
    """Of its work message, when it last came further."""
    priority: int = JOB_PRIORITY
    output_kept_s: float = 24 * 3600.0
    """From its end, what came out of it."""
    usage: BatchUsage = BatchUsage()
    errors: tuple[BatchError, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def final(self) -> bool:
        return self.status in BATCH_FINAL


@dataclass(frozen=True, slots=True)
class BatchLine:
    """The one result of a line."""

    number: int
    """From 0."""
    custom_id: str
    status_code: int
    """0: it was not answered, and `data` is the error itself."""
    data: bytes
    """JSON: the answer, or the error body."""


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """In the batch's log, whose last entry has its state."""

    state: BatchState
    lines: tuple[BatchLine, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchWork:
    """In the queue, until the batch has ended."""

    state: BatchState
    """As it was accepted."""
