"""Spans and metrics of the bus, named by OpenTelemetry's messaging conventions (`nats` is a custom system there)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode

from pdbus.errors import PdbusError
from pdbus.subjects import Subject

log = logging.getLogger(__name__)

TELL_EVERY_S = 1.0


def recorded(tracer: trace.Tracer) -> bool:
    """Whether its spans go anywhere. Until a provider is installed, which is for good, tracers are stand-ins."""
    # OpenTelemetry's own way to ask for its provider reads the environment each time: a twentieth of a router's work.
    return not isinstance(tracer, trace.ProxyTracer) or trace._TRACER_PROVIDER is not None


class Seldom:
    """Logs what may happen thousands of times a second: at most once a second, and how often it was meanwhile."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._untold = 0
        self._again_s = 0.0

    def __call__(self, what: str, subject: str, why: str) -> None:
        self._untold += 1
        if (now_s := self._now()) >= self._again_s:
            log.warning("%s (%d times), the last on %s: %s", what, self._untold, subject, why)
            self._untold, self._again_s = 0, now_s + TELL_EVERY_S


class Instruments:
    """One per bus. `malformed_count`: messages that could not be read, since the start."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("pdbus.bus")
        meter = metrics.get_meter("pdbus.bus")
        self.calls = meter.create_histogram("messaging.client.operation.duration", unit="s")
        self.handled = meter.create_histogram("messaging.process.duration", unit="s")
        self._malformed = meter.create_counter("pdbus.bus.malformed", unit="{message}")
        self._dropped = meter.create_counter("pdbus.bus.dropped", unit="{message}")
        self._tell_malformed, self._tell_dropped = Seldom(), Seldom()
        self.malformed_count = 0
        self.dropped_count = 0

    def malformed(self, subject: str, why: str) -> None:
        self.malformed_count += 1
        self._malformed.add(1)
        self._tell_malformed("a message is malformed", subject, why)

    def dropped(self, subject: str, why: str) -> None:
        """An event that was not sent or not handled; whoever needs it repairs the gap."""
        self.dropped_count += 1
        self._dropped.add(1)
        self._tell_dropped("an event was dropped", subject, why)

    def start_span(
        self, kind: SpanKind, operation: str, subject: Subject, request_id: str, parent: Context | None
    ) -> Span:
        return self._tracer.start_span(
            f"{operation} {subject.template}",
            context=parent,
            kind=kind,
            attributes={
                "messaging.system": "nats",
                "messaging.operation.name": operation,
                "messaging.operation.type": "process" if kind is SpanKind.SERVER else "send",
                "messaging.destination.template": subject.template,
                "messaging.message.conversation_id": request_id,
            },
        )

    def span(
        self, kind: SpanKind, operation: str, subject: Subject, request_id: str, parent: Context | None = None
    ) -> AbstractContextManager[Span]:
        """The current span of the scope; an exception that leaves it marks it as failed.

        Nothing is made where spans go nowhere and no `parent` has to be passed on."""
        if not parent and not recorded(self._tracer):
            return nullcontext(INVALID_SPAN)
        return self._current(self.start_span(kind, operation, subject, request_id, parent))

    @contextmanager
    def _current(self, span: Span) -> Iterator[Span]:
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield span
            except BaseException as error:
                mark_failed(span, error)
                raise


def mark_failed(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", error.code if isinstance(error, PdbusError) else type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, error.message if isinstance(error, PdbusError) else None))
