"""Sets up OpenTelemetry for a process, and takes it down within a bound."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

import prometheus_client
from opentelemetry import metrics, trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from pdbus.messages.presence import Load
from pdbus.settings import Settings
from pdbus.tasks import cancelled
from pdbus.telemetry.spans import meter

log = logging.getLogger(__name__)

PROMETHEUS_CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_EXPORT_S = 2.0
"""Of one export, and of the flush at the end: a collector that is away must not hold up a shutdown."""


@contextmanager
def telemetry(settings: Settings, service: str) -> Iterator[Telemetry]:
    """Installs the process's providers. Once per process: OpenTelemetry keeps them for good.

    Traces are recorded only where there is somewhere to send them; W3C context is passed on in any case."""
    resource = Resource.create(
        {
            "service.name": f"pdbus-{service}",
            "service.namespace": "pdbus",
            "service.instance.id": settings.id,
            "pdbus.model": settings.model,
        }
    )
    readers: list[MetricReader] = [PrometheusMetricReader()]
    tracing: TracerProvider | None = None
    if settings.otlp_endpoint:
        # Only here: they cost every process without a collector memory and a tenth of a second of its start.
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        endpoint = settings.otlp_endpoint.rstrip("/")
        tracing = TracerProvider(resource=resource, shutdown_on_exit=False)
        tracing.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(f"{endpoint}/v1/traces", timeout=_EXPORT_S), schedule_delay_millis=500)
        )
        trace.set_tracer_provider(tracing)
        if settings.metrics_exporter == "otlp":
            readers.append(
                PeriodicExportingMetricReader(OTLPMetricExporter(f"{endpoint}/v1/metrics", timeout=_EXPORT_S))
            )
    measuring = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
    metrics.set_meter_provider(measuring)
    try:
        yield Telemetry(tracing, measuring)
    finally:
        if tracing is not None:
            tracing.shutdown()
        measuring.shutdown(timeout_millis=_EXPORT_S * 1e3)


def prometheus_text() -> bytes:
    """This process's metrics in the Prometheus text format (PROMETHEUS_CONTENT_TYPE)."""
    text: bytes = prometheus_client.generate_latest()
    return text


class Telemetry:
    """A process's telemetry while it lives."""

    def __init__(self, tracing: TracerProvider | None, measuring: MeterProvider) -> None:
        self._tracing = tracing
        self._measuring = measuring

    async def flush(self) -> None:
        """Sends what is recorded, within 2 s each for spans and metrics; what fails is logged."""
        try:
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.force_flush, int(_EXPORT_S * 1e3))
                await asyncio.to_thread(self._measuring.force_flush, _EXPORT_S * 1e3)
        except Exception:
            log.warning("telemetry was not flushed", exc_info=True)

    @asynccontextmanager
    async def load(self, read: Callable[[], Load]) -> AsyncIterator[None]:
        """Shows the fields of `read()` as gauges `pdbus.load.<field>`, read in the event loop twice a second."""
        latest = read()

        def gauge(field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
            return lambda _: [Observation(getattr(latest, field))]

        for field in dataclasses.fields(Load):
            meter().create_observable_gauge(f"pdbus.load.{field.name}", [gauge(field.name)])

        async def refresh() -> None:
            nonlocal latest
            while True:
                await asyncio.sleep(0.5)
                latest = read()

        task = asyncio.create_task(refresh())
        try:
            yield
        finally:
            await cancelled(task)
