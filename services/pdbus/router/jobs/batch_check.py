"""Whether every line of a batch's file is a request."""

from __future__ import annotations

from collections.abc import AsyncIterable

from pdbus.errors import InvalidRequest, NotFound
from pdbus.messages.jobs import BatchError, JobEndpoint
from pdbus.router.jobs.lines import MOST_LINES, parse

_MOST_ERRORS = 50


async def check(lines: AsyncIterable[tuple[int, bytes]], endpoint: JobEndpoint) -> tuple[int, list[BatchError]]:
    """How many requests there are, and what is wrong: as much of it as is worth telling."""
    errors: list[BatchError] = []
    known: set[str] = set()
    at = 0
    try:
        async for at, raw in lines:
            try:
                request = parse(at, raw, endpoint)
            except InvalidRequest as error:
                errors.append(BatchError(error.param or "invalid_request", error.message, at + 1))
            else:
                if request.custom_id in known:
                    reason = f"the custom_id {request.custom_id!r} is there twice"
                    errors.append(BatchError("duplicate_custom_id", reason, at + 1))
                known.add(request.custom_id)
            if len(known) > MOST_LINES:
                errors.append(BatchError("too_many_lines", f"a batch has {MOST_LINES} lines at most"))
            if len(errors) >= _MOST_ERRORS or len(known) > MOST_LINES:
                break
        if not known and not errors:
            errors.append(BatchError("empty_file", "there is no line in the file"))
    except InvalidRequest as error:
        errors.append(BatchError(error.param or "invalid_request", error.message, at + 1))
    except NotFound as error:
        errors.append(BatchError("no_file", error.message))
    return len(known), errors
