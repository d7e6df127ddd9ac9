"""One trace tells where a request's time went at the router, by the names of the conventions."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.support.router_rig import MODEL, rig, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda *args, **kwargs: provider.get_tracer("test"))
    return exporter


async def _ask(url: str, **fields: object) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0} | fields
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    target = url + "/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(target, json=body, headers=headers) as response:
        await response.read()
        return response.status


def _named(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


async def test_the_spans_of_a_request(spans: InMemorySpanExporter):
    async with rig() as r:
        spans.clear()  # of the start
        assert await _ask(r.url, stream=True) == 200
        await r.until_idle()
    named = _named(spans)
    server = named[f"chat {MODEL}"]
    assert server.kind is SpanKind.SERVER
    assert server.context.trace_id == int(TRACE, 16)
    assert server.parent is not None
    assert server.parent.span_id == int(CALLER, 16)
    assert server.attributes is not None
    assert server.attributes["gen_ai.usage.output_tokens"] == 5
    assert server.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert server.attributes["pdbus.root"] == r.roots[0].hex()
    for name in ("queue", "tokenize", "result_cache", "attempt", "first_token"):
        child = named[name]
        assert child.parent is not None
        assert child.parent.span_id == server.context.span_id, name
    calls = [span for span in spans.get_finished_spans() if span.kind is SpanKind.CLIENT]
    assert {call.parent.span_id for call in calls if call.parent} == {named["attempt"].context.span_id}
    assert {span.context.trace_id for span in spans.get_finished_spans() if span.kind is not SpanKind.INTERNAL} == {
        int(TRACE, 16)
    }


async def test_a_failed_request_says_why(spans: InMemorySpanExporter):
    async with rig() as r:
        assert await _ask(r.url, max_tokens=10_000) == 400
    server = _named(spans)[f"chat {MODEL}"]
    assert server.status.status_code is StatusCode.ERROR
    assert server.attributes is not None
    assert server.attributes["error.type"] == "too_large"
    texts = [str(value) for span in spans.get_finished_spans() for value in (span.attributes or {}).values()]
    assert not any(text == "hi" for text in texts), "prompts are never recorded"


async def test_a_client_that_goes_away_is_no_error_of_ours(spans: InMemorySpanExporter):
    async with rig() as r:
        r.prefills[0].behaviour.mute = True
        asking = asyncio.create_task(_ask(r.url))
        await until(lambda: r.router.hub.listening_for > 0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await r.until_idle()
    server = _named(spans)[f"chat {MODEL}"]
    assert server.attributes is not None
    assert server.attributes["error.type"] == "cancelled"
