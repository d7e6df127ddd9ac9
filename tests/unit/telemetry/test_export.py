"""Export in a process of its own, since OpenTelemetry's providers stay for good once they are set."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.support.otlp import otlp_receiver

PROGRAM = """
import asyncio, sys, time
from prometheus_client.parser import text_string_to_metric_families
from pdbus.settings import Settings
from pdbus.messages.presence import Load
from pdbus.telemetry import Phase, event_loop_lag, record_span, telemetry, tracer, prometheus_text, EdgeMetrics

async def main(exporting):
    async with event_loop_lag(), exporting.load(lambda: Load(running=3)):
        with tracer().start_as_current_span("chat m"):
            now = time.time_ns()
            record_span(Phase.QUEUE, now - 2_000_000, now - 1_000_000)
        EdgeMetrics("m").finished("chat", 0.25)
        await asyncio.sleep(0.1)
        time.sleep(0.3)  # holds the loop up, and on a busy machine longer
        await asyncio.sleep(0.1)
        text = prometheus_text().decode()
        assert "gen_ai_client_operation_duration_seconds_bucket" in text, text
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        lag = {one.labels["le"]: one.value for one in samples if "lag_samples" in one.name}
        recent = {one.labels["quantile"]: one.value for one in samples if "lag_recent" in one.name}
        counts = [lag[bound] for bound in sorted(lag, key=float)]
        assert counts == sorted(counts), text
        assert 0 < lag["0.2"] < lag["+Inf"], text  # only some were as late as that
        assert set(recent) == {"0.5", "0.99", "0.999", "1"}, text
        assert recent["0.5"] <= recent["0.99"] <= recent["0.999"] <= recent["1"] > 0.25, text
        assert "pdbus_load_running" in text, text
    await exporting.flush()

with telemetry(Settings(id="r-1", otlp_endpoint=sys.argv[1] or None, metrics_exporter="none"), "router") as exporting:
    asyncio.run(main(exporting))
"""


def _run(endpoint: str) -> float:
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", PROGRAM, endpoint], check=True, timeout=60)
    return time.monotonic() - start


def test_spans_reach_the_receiver_with_their_service_and_parent() -> None:
    with otlp_receiver() as receiver:
        _run(receiver.endpoint)
        outer = next(span for span in receiver.spans if span.name == "chat m")
        queue = next(span for span in receiver.spans if span.name == "queue")
    assert outer.service == "pdbus-router"
    assert queue.parent_id == outer.span_id
    assert queue.duration_ms == 1.0


def test_metrics_are_there_without_an_endpoint() -> None:
    _run("")


def test_a_collector_that_is_away_does_not_hold_up_the_end() -> None:
    assert _run("http://127.0.0.1:9") < 20
