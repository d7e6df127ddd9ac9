"""Counters of a stack's services, as their OpenTelemetry exporters send them to a receiver of the measurement's own."""

from __future__ import annotations

import asyncio
import gzip
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

_EXPORT_S = 0.5

Attributes = frozenset[tuple[str, str]]


@dataclass
class Counters:
    """The newest value of each counter of each process."""

    endpoint: str = ""
    _values: dict[tuple[str, str, Attributes], float] = field(default_factory=dict)
    """(process, counter, attributes) -> total."""

    @property
    def env(self) -> dict[str, str]:
        """For the stack's processes."""
        interval = str(int(_EXPORT_S * 1000))
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_METRIC_EXPORT_INTERVAL": interval}

    async def settle(self) -> None:
        """Waits until what was counted before is here."""
        await asyncio.sleep(3 * _EXPORT_S)

    def total(self, counter: str, **attributes: str) -> float:
        """Over all processes and over all attributes but those given."""
        wanted = attributes.items()
        return sum(value for (_, name, known), value in self._values.items() if name == counter and wanted <= known)

    def by(self, counter: str) -> dict[str, float]:
        """Totals by attributes, in words."""
        found: dict[str, float] = defaultdict(float)
        for (_, name, known), value in self._values.items():
            if name == counter:
                found[" ".join(f"{key}={text}" for key, text in sorted(known))] += value
        return dict(found)

    def take(self, message: bytes) -> None:
        """One export (opentelemetry-proto, collector/metrics/v1)."""
        for resource in ExportMetricsServiceRequest.FromString(message).resource_metrics:
            process = str(sorted((a.key, a.value.string_value) for a in resource.resource.attributes))
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                for point in metric.sum.data_points:
                    known = frozenset((a.key, a.value.string_value) for a in point.attributes)
                    self._values[process, metric.name, known] = point.as_int or point.as_double


@asynccontextmanager
async def counters() -> AsyncIterator[Counters]:
    """Listens on a free loopback port while the scope is open. Spans are taken and dropped."""
    known = Counters()

    async def metrics(request: web.Request) -> web.Response:
        body = await request.read()
        known.take(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        return web.Response(content_type="application/x-protobuf")

    async def other(request: web.Request) -> web.Response:
        return web.Response(content_type="application/x-protobuf")

    app = web.Application(client_max_size=64 << 20)
    app.add_routes([web.post("/v1/metrics", metrics), web.post("/{path:.*}", other)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        addresses: list[Any] = runner.addresses
        known.endpoint = f"http://127.0.0.1:{addresses[0][1]}"
        yield known
    finally:
        await runner.cleanup()
