"""What is told of an answer while it is written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pdbus.engine.sequence import Sequence
from pdbus.telemetry import Phase, WorkerMetrics, record_span


@contextmanager
def decoding(sequence: Sequence, metrics: WorkerMetrics) -> Iterator[None]:
    """Around the time from the first token, which is there already, to the last one or to whatever ends it early."""
    started_ns, first = time.time_ns(), len(sequence.ticket.delivered) + 1
    try:
        yield
    finally:
        ended_ns, tokens = time.time_ns(), sequence.output_index
        record_span(Phase.DECODE, started_ns, ended_ns, attributes={"gen_ai.usage.output_tokens": tokens})
        if tokens > first:
            metrics.per_output_token((ended_ns - started_ns) / 1e9 / (tokens - first))
