"""What a request's headers say of its caller."""

from __future__ import annotations

from typing import cast

import pytest
from aiohttp import web
from multidict import CIMultiDict

from pdbus.errors import InvalidRequest, Unauthorized
from pdbus.router.frontend import Caller
from pdbus.router.http_caller import (
    DEFAULT_TIMEOUT_S,
    IDENTITY,
    bearer_of,
    caller_of,
    read_caller,
    trace_of,
    unread_caller,
)
from pdbus.router.identity import Identity, Quota


def request(headers: dict[str, str]) -> web.Request:
    """aiohttp's own stand-ins take no bytes that are no text."""
    return cast(web.Request, _Request(headers))


class _Request(dict[str, object]):
    def __init__(self, headers: dict[str, str]) -> None:
        super().__init__({IDENTITY: Identity("acme", Quota(), 5, "k")})
        self.headers = CIMultiDict(headers)


def told(headers: dict[str, str], asked_s: float | None = None) -> Caller:
    return caller_of(request(headers), asked_s)


def test_a_caller_that_says_nothing() -> None:
    caller = told({})
    assert (caller.session, caller.idempotency_key, caller.cache.read, caller.cache.store) == (None, None, True, True)
    assert DEFAULT_TIMEOUT_S - 1 < caller.ctx.deadline.remaining_s <= DEFAULT_TIMEOUT_S


def test_a_caller_s_session_key_and_cache() -> None:
    caller = told({"X-Session-Id": "sitzung-ä", "Idempotency-Key": "k", "Cache-Control": "no-store"})
    assert (caller.session, caller.idempotency_key, caller.cache.store) == ("sitzung-ä", "k", False)


@pytest.mark.parametrize("name", ["X-Session-Id", "Idempotency-Key"])
def test_bytes_that_are_no_text_are_refused_by_the_header_s_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match="must be UTF-8") as refused:
        told({name: "a\udcff"})
    assert refused.value.param == name


@pytest.mark.parametrize(("asked_s", "header", "most_s"), [(None, "2000", 2), (1.0, "2000", 1), (3.0, "2000", 2)])
def test_the_earlier_deadline_counts(asked_s: float | None, header: str, most_s: float) -> None:
    assert most_s - 1 < told({"X-Request-Timeout-Ms": header}, asked_s).ctx.deadline.remaining_s <= most_s


@pytest.mark.parametrize("headers", [{}, {"X-Request-Timeout-Ms": "2000"}, {"X-Request-Timeout-Ms": "9000000"}])
@pytest.mark.parametrize("asked_s", [None, 1.0, 300.0])
def test_a_caller_whose_headers_were_looked_at_before_the_body(headers: dict[str, str], asked_s: float | None) -> None:
    http = request(headers)
    before = unread_caller(http)
    after, whole = read_caller(http, before, asked_s), caller_of(http, asked_s)
    assert after.ctx.deadline.remaining_s == pytest.approx(whole.ctx.deadline.remaining_s, abs=0.5)
    assert before.ctx.deadline.remaining_s >= whole.ctx.deadline.remaining_s - 0.5
    assert after.ctx.request_id == before.ctx.request_id


def test_a_header_that_is_no_text_leaves_the_trace_alone() -> None:
    assert not trace_of(request({"X-Any": "\udcff"}))


def test_the_tenant_is_the_key_s_and_nothing_that_a_header_says() -> None:
    caller = told({"pd-tenant": "other", "X-Tenant": "other"})
    assert (caller.ctx.tenant, caller.identity.key_id) == ("acme", "k")


@pytest.mark.parametrize(("header", "token"), [
    ("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("BEARER abc", "abc"), ("Bearer", ""), ("Bearer ", ""),
])  # fmt: skip
def test_the_bearer_of_a_request(header: str, token: str) -> None:
    assert bearer_of(request({"Authorization": header})) == token
    assert bearer_of(request({})) is None


@pytest.mark.parametrize("header", ["Basic YTpi", "abc", ""])
def test_other_proofs_are_refused_without_being_repeated(header: str) -> None:
    with pytest.raises(Unauthorized) as refused:
        bearer_of(request({"Authorization": header}))
    assert "YTpi" not in refused.value.message
