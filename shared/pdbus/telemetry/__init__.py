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
from pdbus.telemetry.providers import PROMETHEUS_CONTENT_TYPE, Telemetry, prometheus_text, telemetry
from pdbus.telemetry.spans import Phase, meter, record_span, tracer

__all__ = [
    "PROMETHEUS_CONTENT_TYPE",
    "Attributes",
    "EdgeMetrics",
    "Phase",
    "Telemetry",
    "WorkerMetrics",
    "embedding_attributes",
    "meter",
    "prometheus_text",
    "record_span",
    "request_attributes",
    "response_attributes",
    "span_name",
    "telemetry",
    "tracer",
]
