"""OpenTelemetry for every process: providers and export, the names of spans and metrics, the event loop's lag."""

from pdbus.telemetry.genai import (
    Attributes,
    EdgeMetrics,
    WorkerMetrics,
    embedding_attributes,
    request_attributes,
    response_attributes,
    span_name,
)
from pdbus.telemetry.loop_lag import event_loop_lag
from pdbus.telemetry.providers import PROMETHEUS_CONTENT_TYPE, Telemetry, prometheus_text, telemetry
from pdbus.telemetry.spans import Phase, meter, record_span, span, tracer
from pdbus.telemetry.tally import Tally

__all__ = [
    "PROMETHEUS_CONTENT_TYPE",
    "Attributes",
    "EdgeMetrics",
    "Phase",
    "Tally",
    "Telemetry",
    "WorkerMetrics",
    "embedding_attributes",
    "event_loop_lag",
    "meter",
    "prometheus_text",
    "record_span",
    "request_attributes",
    "response_attributes",
    "span",
    "span_name",
    "telemetry",
    "tracer",
]
