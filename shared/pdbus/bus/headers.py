"""What travels in NATS headers: who asks and until when, the trace context, the marks of replies and stream frames."""

from __future__ import annotations

import math
from collections.abc import Mapping

from opentelemetry import propagate
from opentelemetry.context import Context

from pdbus.bus.codec import decode, encode
from pdbus.bus.transport import NO_RESPONDERS, STATUS, Raw
from pdbus.context import DEFAULT_PRIORITY, HIGHEST_PRIORITY, Deadline, RequestContext, new_id
from pdbus.errors import Corrupt, InvalidRequest, PdbusError, Unavailable, WireError
from pdbus.subject_tokens import decode_token, encode_token

REQUEST_ID = "pd-id"
TENANT = "pd-tenant"
API_KEY = "pd-key"
"""A caller's API key, for routers."""
PRIORITY = "pd-priority"
"""0 to 9; 5 where it is absent."""
DEADLINE = "pd-deadline"
"""Wall-clock nanoseconds."""
BUDGET = "pd-budget"
"""Milliseconds left at sending."""
ERROR = "pd-error"
"""The body is a WireError."""
SEQUENCE = "pd-seq"
"""Frames of the stream before this one."""
END = "pd-end"
ALIVE = "pd-alive"
"""A frame without a body: the handler is at work."""
ALIVE_WANTED: Mapping[str, str] = {ALIVE: "?"}
"""To the reply subject of a stream's frame: such a frame is wanted."""

CALLER_GONE: Mapping[str, str] = {STATUS: NO_RESPONDERS}
"""To the reply subject of a stream's frame; the broker sends the same when the caller's process is gone."""

LONGEST_NAME = 128
"""Characters of a request id or tenant; both become parts of subjects and keys."""

DEFAULT_DEADLINE_S = 60.0
"""For a request that names none (a caller without this library)."""


def request_headers(ctx: RequestContext, trace: Context | None = None) -> dict[str, str]:
    """`trace`: the OpenTelemetry context to pass on; the current one if None."""
    headers = {
        REQUEST_ID: ctx.request_id,
        DEADLINE: str(ctx.deadline.wall_ns),
        BUDGET: f"{max(ctx.deadline.remaining_s, 0.0) * 1e3:.3f}",
    }
    if ctx.tenant != "anonymous":
        headers[TENANT] = encode_token(ctx.tenant)
    if ctx.api_key is not None:
        headers[API_KEY] = ctx.api_key
    if ctx.priority != DEFAULT_PRIORITY:
        headers[PRIORITY] = str(ctx.priority)
    propagate.inject(headers, trace)
    return headers


def read_context(headers: Mapping[str, str]) -> RequestContext:
    """Raises InvalidRequest for a deadline, budget or priority that is no such number, an overlong id or tenant."""
    wall_ns = _number(headers, DEADLINE)
    budget_ms = _number(headers, BUDGET)
    if wall_ns is not None:
        deadline = Deadline.from_wire(int(wall_ns), budget_ms)
    else:
        deadline = Deadline.after(DEFAULT_DEADLINE_S if budget_ms is None else budget_ms / 1e3)
    tenant = decode_token(headers.get(TENANT, "")) or "anonymous"
    request_id = headers.get(REQUEST_ID) or new_id()
    for header, name in ((TENANT, tenant), (REQUEST_ID, request_id)):
        if len(name) > LONGEST_NAME:
            raise InvalidRequest(f"longer than {LONGEST_NAME} characters", param=header)
    return RequestContext(deadline, request_id, tenant, headers.get(API_KEY), read_priority(headers, PRIORITY))


def read_priority(headers: Mapping[str, str], name: str) -> int:
    """Raises InvalidRequest that names the header."""
    text = headers.get(name, str(DEFAULT_PRIORITY))
    if len(text) != 1 or text not in "0123456789":
        raise InvalidRequest(f"{name} must be 0 to {HIGHEST_PRIORITY}", param=name)
    return int(text)


def read_trace(headers: Mapping[str, str]) -> Context:
    return propagate.extract(headers)


def error_of(raw: Raw, name: str) -> PdbusError | None:
    """The error that a reply carries, if it is one. `name`: the subject that was asked."""
    if raw.headers.get(STATUS) == NO_RESPONDERS:
        return Unavailable(f"nobody serves {name}")
    if ERROR not in raw.headers:
        return None
    try:
        return decode(WireError, raw.data).to_exception()
    except InvalidRequest as error:
        return Corrupt(f"{name} sent an error that can't be read: {error.message}")


def encode_error(error: BaseException) -> bytes:
    return encode(WireError.of(error))


def _number(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) < 1e20:  # NaN too
        raise InvalidRequest(f"{text[:40]!r} is no such number", param=name)
    return value
