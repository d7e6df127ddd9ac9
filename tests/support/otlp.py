"""An OTLP/HTTP receiver that keeps the spans it is sent: what a collector or Jaeger would see."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    kind: int

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


@dataclass
class Receiver:
    endpoint: str
    spans: list[Span] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def trace(self, trace_id: str, complete: Any, timeout_s: float) -> list[Span]:
        """The spans of one trace as soon as `complete(spans)` holds; those that came by the time limit otherwise."""
        with self.arrived:
            self.arrived.wait_for(lambda: complete(self._of(trace_id)), timeout_s)
            return self._of(trace_id)

    def _of(self, trace_id: str) -> list[Span]:
        return sorted((s for s in self.spans if s.trace_id == trace_id), key=lambda span: span.start_ns)


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """Listens on a free loopback port while the scope is open."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                request = ExportTraceServiceRequest.FromString(body)
                with receiver.arrived:
                    receiver.spans += _spans(request)
                    receiver.arrived.notify_all()
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def _spans(request: ExportTraceServiceRequest) -> list[Span]:
    found = []
    for resource in request.resource_spans:
        service = next(
            (a.value.string_value for a in resource.resource.attributes if a.key == "service.name"), "unknown"
        )
        for scope in resource.scope_spans:
            for span in scope.spans:
                attributes = {
                    a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value") for a in span.attributes
                }
                found.append(
                    Span(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        attributes,
                        span.kind,
                    )
                )
    return found
