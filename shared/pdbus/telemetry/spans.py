"""Spans of one's own work, beside those that the bus makes of its calls."""

from __future__ import annotations

from enum import StrEnum

from opentelemetry import metrics, trace
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import Attributes


class Phase(StrEnum):
    """Where the time of a request goes. Their gaps in the trace add up to the request's time."""

    QUEUE = "queue"
    """Accepted by a worker or the router, not yet begun."""
    PREFILL = "prefill"
    """First chunk begun to first token sampled."""
    KV_TRANSFER = "kv_transfer"
    """First page sent to the final frame acknowledged."""
    FIRST_TOKEN = "first_token"  # noqa: S105 - a phase of a request, not a secret
    """Request received to first token delivered, at the router."""
    DECODE = "decode"
    """Joined the running batch to the last token."""


def tracer() -> trace.Tracer:
    """The process's tracer; spans cost next to nothing where nothing is exported."""
    return trace.get_tracer("pdbus")


def meter() -> metrics.Meter:
    return metrics.get_meter("pdbus")


def record_span(name: str, start_ns: int, end_ns: int, *, attributes: Attributes = None) -> None:
    """A span below the current one whose times are known afterwards (wall-clock ns), as of work in another thread."""
    span = tracer().start_span(name, kind=SpanKind.INTERNAL, attributes=attributes, start_time=start_ns)
    span.end(end_time=end_ns)
