"""Log lines: one a record, each naming its trace."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from pdbus.bus.headers import read_trace
from pdbus.runtime import logs

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before, level


def test_json_lines_hold_message_process_trace_and_exception(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("decode", "decode-1", "info", "json")
    log = logging.getLogger("pdbus.somewhere")
    span = NonRecordingSpan(SpanContext(TRACE_ID, 7, is_remote=False, trace_flags=TraceFlags(1)))
    with trace.use_span(span):
        log.info("pages %d\nfree", 3)
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    log.debug("not wanted")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["message"] == "pages 3\nfree"
    assert (first["service"], first["id"], first["level"]) == ("decode", "decode-1", "INFO")
    assert first["trace_id"] == f"{TRACE_ID:032x}"
    assert "ValueError: broken" in second["exception"]
    assert "trace_id" not in second


def test_text_lines_name_process_and_trace(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("decode", "100%-1", "INFO", "text")
    span = NonRecordingSpan(SpanContext(TRACE_ID, 7, is_remote=False, trace_flags=TraceFlags(1)))
    with trace.use_span(span):
        logging.getLogger("pdbus.somewhere").warning("hot")
    line = capsys.readouterr().err
    assert "100%-1 pdbus.somewhere: hot" in line
    assert f"trace={TRACE_ID:032x}" in line


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        logs.configure("decode", "decode-1", "loud", "text")


def test_what_a_message_quotes_begins_no_line_and_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Else whoever sends a name could write lines into the log, of anything by anybody."""
    logs.configure("router", "router-1", "INFO", "text")
    forged = "x\n2026-01-01 00:00:00,000 ERROR   router-1 pdbus: forged\r\x1b[2J\u2028\x85"
    logging.getLogger("pdbus.somewhere").info("no model %s", forged)
    try:
        raise ValueError(forged)
    except ValueError:
        logging.getLogger("pdbus.somewhere").exception("failed")
    told = capsys.readouterr().err
    assert told.count("forged") >= 2
    assert not [line for line in told.splitlines() if line.startswith("2026-01-01")]
    assert not set("\r\x1b\u2028\x85") & set(told)


def test_headers_of_a_trace_that_are_none_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", "router-1", "INFO", "text")
    good = {"traceparent": f"00-{TRACE_ID:032x}-00000000000000aa-01"}
    for bad in (
        {"baggage": "secret"},
        {"tracestate": "secret"},
        {"tracestate": "x" * 5000},
        {"traceparent": "x" * 999},
    ):
        read_trace(good | bad)
    assert capsys.readouterr().err == ""
