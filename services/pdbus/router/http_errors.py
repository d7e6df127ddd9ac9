"""Errors in OpenAI's terms: one table from the exception tree to status, type and code."""

from __future__ import annotations

import math

from msgspec import Struct

from pdbus import errors
from pdbus.errors import PdbusError

_TABLE: dict[type[PdbusError], tuple[int, str, str]] = {
    errors.InvalidRequest: (400, "invalid_request_error", "invalid_request"),
    errors.TooLarge: (400, "invalid_request_error", "context_length_exceeded"),
    errors.Unauthorized: (401, "authentication_error", "invalid_api_key"),
    errors.Forbidden: (403, "permission_error", "forbidden"),
    errors.NotFound: (404, "invalid_request_error", "model_not_found"),
    errors.RootGone: (503, "server_error", "root_gone"),
    errors.Conflict: (409, "invalid_request_error", "conflict"),
    errors.DeadlineExceeded: (504, "timeout_error", "deadline_exceeded"),
    errors.Cancelled: (499, "cancelled", "cancelled"),
    errors.QuotaExceeded: (429, "insufficient_quota", "quota_exceeded"),
    errors.Overloaded: (429, "rate_limit_error", "overloaded"),
    errors.Unavailable: (503, "server_error", "unavailable"),
    errors.Corrupt: (502, "server_error", "corrupt"),
}
_INTERNAL = (500, "server_error", "internal_error")


class ErrorDetail(Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, frozen=True):
    """The body of every answer that is an error, and the last event of a stream that failed."""

    error: ErrorDetail


def describe(error: BaseException) -> tuple[int, ErrorBody]:
    """Status and body of any exception. A foreign one is told without its text: that may hold secrets."""
    if isinstance(error, TimeoutError):
        error = errors.DeadlineExceeded("the request's deadline passed")
    if not isinstance(error, PdbusError):
        return 500, ErrorBody(ErrorDetail("internal error; the router's log has the details", *_INTERNAL[1:2], None))
    known = next((_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE), _INTERNAL)
    code = "not_found" if isinstance(error, errors.NotFound) and error.param == "id" else known[2]
    return known[0], ErrorBody(ErrorDetail(error.message, known[1], error.param, code))


def headers_of(error: BaseException) -> dict[str, str]:
    """Whether to try again, as OpenAI's clients read it, and when."""
    if not isinstance(error, PdbusError):
        return {}
    if isinstance(error, errors.Unauthorized):
        return {"x-should-retry": "false", "WWW-Authenticate": "Bearer"}
    # Statuses alone would make them repeat a request that ran out of its own time.
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.retryable or error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    return headers
