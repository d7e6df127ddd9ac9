"""The context of a request in headers."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.bus import headers
from pdbus.bus.nats_wire import header_block, read_headers
from pdbus.bus.transport import Raw
from pdbus.context import Deadline, RequestContext
from pdbus.errors import Corrupt, InvalidRequest, StaleAttempt, Unavailable, WireError


@given(st.floats(0.1, 500), st.text(min_size=1, max_size=40))
def test_a_context_comes_back_and_its_deadline_never_later(seconds: float, tenant: str) -> None:
    ctx = RequestContext(Deadline.after(seconds), "id-1", tenant)
    read = headers.read_context(headers.request_headers(ctx))
    assert (read.request_id, read.tenant) == ("id-1", tenant)
    # Never later, but for the moment that may pass between two looks at the clocks of a busy machine.
    assert -2 < read.deadline.at_monotonic_s - ctx.deadline.at_monotonic_s < 0.1


@pytest.mark.parametrize(("wall_s", "budget_s"), [(2, 50), (50, 2)])
def test_the_smaller_of_clock_and_budget_wins(wall_s: int, budget_s: int) -> None:
    wall = str(time.time_ns() + wall_s * 10**9)
    read = headers.read_context({headers.DEADLINE: wall, headers.BUDGET: str(budget_s * 1e3)})
    assert 1.5 < read.deadline.remaining_s < 2.1


def test_a_caller_without_the_library_gets_defaults() -> None:
    read = headers.read_context({})
    assert read.tenant == "anonymous"
    assert len(read.request_id) == 32
    assert 0 < read.deadline.remaining_s <= headers.DEFAULT_DEADLINE_S


CONTEXT_HEADERS = st.sampled_from([headers.DEADLINE, headers.BUDGET, headers.TENANT, headers.REQUEST_ID])


@given(st.dictionaries(CONTEXT_HEADERS, st.text()))
def test_garbage_is_invalid_or_read_and_nothing_else(garbage: dict[str, str]) -> None:
    try:
        ctx = headers.read_context(garbage)
    except InvalidRequest as error:
        wrong = error.param
    else:
        assert ctx.deadline.remaining_s <= 600
        return
    assert wrong in garbage


def test_errors_in_replies() -> None:
    stale = Raw("s", "", {headers.ERROR: "1"}, headers.encode_error(StaleAttempt("old")))
    assert isinstance(headers.error_of(stale, "s"), StaleAttempt)
    assert isinstance(headers.error_of(Raw("s", "", headers.CALLER_GONE, b""), "s"), Unavailable)
    assert isinstance(headers.error_of(Raw("s", "", {headers.ERROR: "1"}, b"\xc1"), "s"), Corrupt)
    assert headers.error_of(Raw("s", "", {}, b""), "s") is None
    assert WireError.of(StaleAttempt("old")).to_exception().message == "old"


NAMES = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1).filter(lambda name: name != "status")
VALUES = st.text(st.characters(min_codepoint=33, exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]))


@given(st.dictionaries(NAMES, VALUES))
def test_a_header_block_is_read_as_it_was_written(written: dict[str, str]) -> None:
    assert read_headers(header_block(written)) == written


@given(st.binary(max_size=200))
def test_reading_a_header_block_never_raises(block: bytes) -> None:
    read_headers(block)


def test_a_status_line_is_read() -> None:
    block = b"NATS/1.0 503 No Responders\r\nNats-Subject: a.b\r\n\r\n"
    assert read_headers(block) == {"status": "503", "nats-subject": "a.b"}


def test_the_bus_needs_no_torch() -> None:
    code = "import sys, pdbus.bus.bus, pdbus.bus.presence, pdbus.bus.logs; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
