"""One trace across processes: client and server spans of calls and streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pdbus.bus.bus import Bus
from pdbus.context import RequestContext
from pdbus.errors import StaleAttempt
from pdbus.messages.router import InferReply, InferRequest
from pdbus.messages.workers import Resend, ResendReply
from pdbus.subjects import DECODE_RESEND, INFER
from tests.support.nats import BusPair

Unique = Callable[[str], str]


@pytest.fixture
def spans(bus_pair: BusPair) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def trace(bus: Bus) -> None:
        bus.instruments._tracer = provider.get_tracer("test")

    trace(bus_pair.server)
    trace(bus_pair.client)
    return exporter


def by_kind(exporter: InMemorySpanExporter) -> dict[SpanKind, ReadableSpan]:
    return {span.kind: span for span in exporter.get_finished_spans()}


async def test_a_call_is_one_trace(bus_pair: BusPair, unique: Unique, spans: InMemorySpanExporter) -> None:
    async def handler(message: Resend, ctx: RequestContext) -> ResendReply:
        raise StaleAttempt("old")

    to = DECODE_RESEND(worker=unique("d"))
    registration = await bus_pair.server.serve(to, handler)
    ctx = RequestContext.after(30)
    with pytest.raises(StaleAttempt):
        await bus_pair.client.call(to, Resend("r", 0, 1, 0), ctx)
    await registration.close()
    found = by_kind(spans)
    client, server = found[SpanKind.CLIENT], found[SpanKind.SERVER]
    assert server.parent is not None
    assert client.context is not None
    assert (server.parent.trace_id, server.parent.span_id) == (client.context.trace_id, client.context.span_id)
    assert (client.name, server.name) == (f"request {DECODE_RESEND.template}", f"process {DECODE_RESEND.template}")
    for span in (client, server):
        assert span.attributes is not None
        assert span.attributes["messaging.system"] == "nats"
        assert span.attributes["messaging.message.conversation_id"] == ctx.request_id
        assert span.attributes["error.type"] == "stale_attempt"
        assert span.status.status_code is StatusCode.ERROR


async def test_a_stream_is_one_span_on_each_side(
    bus_pair: BusPair, unique: Unique, spans: InMemorySpanExporter
) -> None:
    async def handler(message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        for _ in range(10):
            yield InferReply({})

    to = INFER(model=unique("m"))
    registration = await bus_pair.server.serve(to, handler)
    async with bus_pair.client.stream(to, InferRequest("completions", {}), RequestContext.after(30)) as replies:
        assert len([reply async for reply in replies]) == 10
    await registration.close()
    assert len(spans.get_finished_spans()) == 2
    found = by_kind(spans)
    server, client = found[SpanKind.SERVER], found[SpanKind.CLIENT]
    assert server.parent is not None
    assert client.context is not None
    assert server.parent.span_id == client.context.span_id
    assert client.status.status_code is StatusCode.UNSET
