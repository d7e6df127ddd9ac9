"""One streamed request is one trace across the services, and the trace shows where the time went."""

from __future__ import annotations

import secrets

import openai

from tests.support.otlp import Receiver, Span
from tests.support.stack import Stack

PHASES = ("queue", "prefill", "kv_transfer", "decode")


def test_one_trace_shows_where_the_time_went(client: openai.OpenAI, stack: Stack, traces: Receiver) -> None:
    trace_id = secrets.token_hex(16)
    question = f"Tell me about the number {secrets.randbelow(10**9)} and why trains run late. " * 8
    stream = client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": question}],
        max_tokens=24,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"},
    )
    assert sum(1 for _ in stream) > 20

    def complete(spans: list[Span]) -> bool:
        return {"queue", "prefill", "kv_transfer", "decode"} <= {span.name for span in spans} and any(
            span.name.startswith("chat ") for span in spans
        )

    spans = traces.trace(trace_id, complete, timeout_s=60)
    services = {span.service.removeprefix("pdbus-").removeprefix("pdbus.") for span in spans}
    assert {"router", "prefill", "decode"} <= services
    assert services & {"cache", "param_server"}

    request = next(span for span in spans if span.name.startswith("chat "))
    assert request.attributes["gen_ai.request.model"] == stack.model
    assert request.attributes["gen_ai.usage.output_tokens"] == 24
    ids = {span.span_id for span in spans}
    orphans = [span.name for span in spans if span is not request and span.parent_id not in ids]
    assert orphans == []
    _gaps_add_up(request, [span for span in spans if span.name in PHASES])


def _gaps_add_up(request: Span, phases: list[Span]) -> None:
    """The phases cover the request's time: what no phase accounts for is less than a tenth of it, or 30 ms."""
    covered_ns, end_ns = 0, request.start_ns
    for phase in sorted(phases, key=lambda span: span.start_ns):
        start_ns = max(phase.start_ns, end_ns)
        stop_ns = min(phase.end_ns, request.end_ns)
        covered_ns += max(stop_ns - start_ns, 0)
        end_ns = max(end_ns, stop_ns)
    missing_ms = request.duration_ms - covered_ns / 1e6
    story = [(phase.name, phase.service, round(phase.duration_ms, 1)) for phase in phases]
    assert missing_ms <= max(0.1 * request.duration_ms, 30), (request.duration_ms, missing_ms, story)
