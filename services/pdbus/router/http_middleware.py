"""What every HTTP request goes through: who asks is found out first, and whatever goes wrong is told in one form."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from pdbus.router.http_caller import IDENTITY, bearer_of
from pdbus.router.http_errors import ErrorBody, ErrorDetail, describe, headers_of
from pdbus.router.http_pages import OPEN_PAGES
from pdbus.router.identity import Identities

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors_told(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong is told in OpenAI's form."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        detail = ErrorDetail(_http_reason(request, error), "invalid_request_error", None, None)
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return _error(error.status, ErrorBody(detail), headers)
    except Exception as error:
        status, body = describe(error)
        if status == 500:
            log.exception("%s %s failed", request.method, request.path)
        return _error(status, body, headers_of(error))


def identified(identities: Identities) -> Middleware:
    """Who asks is known before anything of the request's body is read, for every page but the open ones."""

    @web.middleware
    async def known(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PAGES:
            request[IDENTITY] = identities.of(bearer_of(request))
        return await handler(request)

    return known


def _http_reason(http: web.Request, error: web.HTTPException) -> str:
    reasons = {
        404: f"there is no {http.path[:200]} here",
        405: f"{http.method} is not possible on {http.path[:200]}",
        413: "the request's body is too large",
    }
    # aiohttp's own text only says the status again.
    own = error.text if error.text and not error.text.startswith(f"{error.status}:") else error.reason
    return reasons.get(error.status, own)


def _error(status: int, body: ErrorBody, headers: dict[str, str]) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json", headers=headers)
