"""The lines of a batch: requests as they come in, answers as they go out. Pure."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from pdbus.canonical import digest
from pdbus.errors import InvalidRequest
from pdbus.messages.jobs import BatchLine, JobEndpoint

MOST_LINES: Final = 50_000
LONGEST_LINE: Final = 512 << 10
PATHS: Final[dict[JobEndpoint, str]] = {
    "chat.completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
}
ENDPOINTS: Final[dict[str, JobEndpoint]] = {path: endpoint for endpoint, path in PATHS.items()}


class _Line(Struct, frozen=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a batch's file."""

    number: int
    """From 0, blank lines counted."""
    custom_id: str
    body: bytes
    """JSON; a valid one, of whatever shape."""


async def split(content: AsyncIterable[bytes]) -> AsyncGenerator[tuple[int, bytes], None]:
    """The lines that are not blank, with their numbers. Raises InvalidRequest for one that is too long."""
    number, rest = 0, b""
    async for piece in content:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            _check_length(number, line)
            if line.strip():
                yield number, line
            number += 1
        _check_length(number, rest)
    if rest.strip():
        yield number, rest


def _check_length(number: int, line: bytes) -> None:
    if len(line) > LONGEST_LINE:
        raise InvalidRequest(f"line {number + 1} has more than {LONGEST_LINE} bytes", param="line_too_long")


def parse(number: int, line: bytes, endpoint: JobEndpoint) -> Request:
    """Raises InvalidRequest, whose `param` is OpenAI's code of the error."""
    try:
        read = msgspec.json.decode(line, type=_Line)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), param="invalid_request") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"this line is no JSON: {error}", param="invalid_json_line") from None
    if read.url != PATHS[endpoint]:
        raise InvalidRequest(f"the url is {read.url[:64]!r}, of the batch {PATHS[endpoint]!r}", param="mismatched_url")
    return Request(number, read.custom_id, bytes(read.body))


class _Response(Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _OutputLine(Struct, frozen=True):
    id: str
    custom_id: str
    response: _Response | None
    error: msgspec.Raw


_NULL = msgspec.Raw(b"null")


def output(batch: str, line: BatchLine) -> bytes:
    """As OpenAI has it, with its end."""
    request = digest(["pdbus batch line", batch, line.number])[:12].hex()
    data = msgspec.Raw(line.data)
    response = _Response(line.status_code, request, data) if line.status_code else None
    written = _OutputLine(f"batch_req_{request}", line.custom_id, response, _NULL if response else data)
    return msgspec.json.encode(written) + b"\n"
