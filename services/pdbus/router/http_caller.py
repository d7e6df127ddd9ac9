"""Who asks by HTTP, until when, and how: what the request's headers say."""

from __future__ import annotations

import re
from dataclasses import replace

from aiohttp import web
from opentelemetry import propagate
from opentelemetry.context import Context

from pdbus.bus.headers import read_priority
from pdbus.context import LONGEST_DEADLINE_S, Deadline, RequestContext
from pdbus.errors import InvalidRequest, Unauthorized
from pdbus.router.cache_control import CacheControl
from pdbus.router.frontend import Caller
from pdbus.router.identity import Identity

DEFAULT_TIMEOUT_S = 120.0
_TIMEOUT = "X-Request-Timeout-Ms"
IDENTITY = web.RequestKey("identity", Identity)
"""Set before any handler runs (http_middleware.py)."""


def caller_of(http: web.Request, asked_s: float | None) -> Caller:
    """`asked_s`: the timeout that the body names. Raises InvalidRequest that names the header."""
    timeout_s = asked_s or DEFAULT_TIMEOUT_S
    header = http.headers.get(_TIMEOUT)
    if header is not None:
        if not re.fullmatch(r"[1-9][0-9]{0,8}", header):
            raise InvalidRequest(f"{_TIMEOUT} must be a number of milliseconds", param=_TIMEOUT)
        timeout_s = min(int(header) / 1e3, asked_s or float(header))
    key = http.headers.get("Idempotency-Key")
    if key is not None and not _is_text(key):
        raise InvalidRequest("Idempotency-Key must be UTF-8", param="Idempotency-Key")
    session = http.headers.get("X-Session-Id")
    if session is not None and not _is_text(session):
        raise InvalidRequest("X-Session-Id must be UTF-8", param="X-Session-Id")
    cache = CacheControl.parse(http.headers.get("Cache-Control", ""))
    identity: Identity = http[IDENTITY]
    priority = min(read_priority(http.headers, "X-Priority"), identity.priority_most)
    ctx = RequestContext(Deadline.after(timeout_s), tenant=identity.tenant, priority=priority)
    return Caller(ctx, cache, key, session, identity)


def unread_caller(http: web.Request) -> Caller:
    """As `caller_of`, before the body is read: until the latest deadline that this may still ask for."""
    return caller_of(http, LONGEST_DEADLINE_S)


def read_caller(http: web.Request, caller: Caller, asked_s: float | None) -> Caller:
    """That caller now that the body is read, without looking at all that the headers say again."""
    if asked_s is None and _TIMEOUT in http.headers:
        return caller
    return replace(caller, ctx=caller.ctx.within(asked_s or DEFAULT_TIMEOUT_S))


def bearer_of(http: web.Request) -> str | None:
    """The API key that the request shows, if any. Raises Unauthorized for another kind of proof."""
    header = http.headers.get("Authorization")
    if header is None:
        return None
    kind, _, token = header.partition(" ")
    if kind.lower() != "bearer":
        raise Unauthorized("the header Authorization must say 'Bearer ' and an API key")
    return token.strip()


def trace_of(http: web.Request) -> Context:
    """The caller's trace context."""
    return propagate.extract({name.lower(): value for name, value in http.headers.items() if _is_text(value)})


def _is_text(value: str) -> bool:
    """Bytes of a header that are no UTF-8 arrive as lone surrogates."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
