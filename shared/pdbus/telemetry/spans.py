"""Spans of one's own work, beside those that the bus makes of its calls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind
from opentelemetry.util.types import Attributes

from pdbus.bus.instruments import recorded


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
    """The process's tracer."""
    return trace.get_tracer("pdbus")


def span(
    own: trace.Tracer,
    name: str,
    *,
    context: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Attributes = None,
    record_exception: bool = True,
) -> AbstractContextManager[Span]:
    """The current span of a scope, by the process's tracer `own`. `context`: of a caller in another process, which is
    passed on in any case.

    Where spans go nowhere and there is nothing to pass on, nothing is made: one of OpenTelemetry's empty
    spans takes 6 µs."""
    if not context and not recorded(own):
        return nullcontext(INVALID_SPAN)
    return own.start_as_current_span(
        name, context=context, kind=kind, attributes=attributes, record_exception=record_exception
    )


def meter() -> metrics.Meter:
    return metrics.get_meter("pdbus")


def record_span(name: str, start_ns: int, end_ns: int, *, attributes: Attributes = None) -> None:
    """A span below the current one whose times are known afterwards (wall-clock ns), as of work in another thread."""
    span = tracer().start_span(name, kind=SpanKind.INTERNAL, attributes=attributes, start_time=start_ns)
    span.end(end_time=end_ns)
