"""The span and the measures of one request, whichever way it came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from pdbus.errors import PdbusError
from pdbus.router.answer import Answer
from pdbus.router.metrics import RouterMetrics
from pdbus.router.openai_schema import Endpoint, GenerateRequest
from pdbus.telemetry import Attributes, Phase, record_span, request_attributes, response_attributes, span_name


class Observed:
    """Told by whoever passes the answer on."""

    def __init__(self, span: Span, operation: str, metrics: RouterMetrics) -> None:
        self._span = span
        self._operation = operation
        self._metrics = metrics
        self._begun_ns = time.time_ns()
        self._begun_s = time.monotonic()
        self.error: str | None = None

    @property
    def so_far_s(self) -> float:
        return time.monotonic() - self._begun_s

    def whole(self, answer: Answer) -> None:
        """The answer is whole and passed on."""
        first_s = None if answer.first_s is None else answer.first_s - self._begun_s
        if first_s is not None:
            record_span(Phase.FIRST_TOKEN, self._begun_ns, self._begun_ns + int(first_s * 1e9))
            self._metrics.edge.first_chunk(self._operation, first_s)
        self._metrics.edge.usage(self._operation, answer.prompt_tokens, answer.completion_tokens)
        self._span.set_attributes(
            response_attributes(
                answer.request.model,
                id=answer.id,
                root=answer.version.root.hex(),
                finish_reasons=[output.finish or "" for output in answer.outputs],
                input_tokens=answer.prompt_tokens,
                output_tokens=answer.completion_tokens,
                cached_tokens=answer.cached_tokens,
                first_chunk_s=first_s,
            )
        )
        self._span.set_attribute("pdbus.result_cache", answer.source)

    def embedded(self, tokens: int, root: str, hits: int) -> None:
        """The vectors are passed on; `hits` of them came from the cache."""
        self._metrics.edge.usage(self._operation, tokens)
        self._span.set_attributes(
            {"gen_ai.usage.input_tokens": tokens, "pdbus.root": root, "pdbus.feature_cache.hits": hits}
        )


def operation_of(endpoint: Endpoint) -> str:
    """As OpenTelemetry names it."""
    return "chat" if endpoint == "chat.completions" else "text_completion"


@contextmanager
def observed(
    request: GenerateRequest, metrics: RouterMetrics, kind: SpanKind, parent: Context | None = None
) -> Iterator[Observed]:
    operation = operation_of(request.endpoint)
    attributes = request_attributes(
        operation,
        request.model,
        request.sampling,
        max_tokens=request.max_tokens or 0,
        seed=request.seed,
        choices=request.n,
        stream=request.stream,
        stop=request.stop,
    )
    if request.max_tokens is None:
        del attributes["gen_ai.request.max_tokens"]
    with measured(operation, request.model, attributes, metrics, kind, parent) as seen:
        yield seen


@contextmanager
def measured(
    operation: str,
    model: str,
    attributes: Attributes,
    metrics: RouterMetrics,
    kind: SpanKind,
    parent: Context | None = None,
) -> Iterator[Observed]:
    """One request of whatever operation."""
    name = span_name(operation, model)
    with metrics.span(name, attributes, kind=kind, parent=parent, record_exception=False) as span:
        seen = Observed(span, operation, metrics)
        try:
            yield seen
        except (PdbusError, TimeoutError) as error:
            seen.error = error.code if isinstance(error, PdbusError) else "deadline_exceeded"
            raise
        except (asyncio.CancelledError, GeneratorExit):
            seen.error = "cancelled"
            raise
        except Exception:
            seen.error = "internal"
            raise
        finally:
            if seen.error is not None:
                span.set_attribute("error.type", seen.error)
                span.set_status(Status(StatusCode.ERROR, seen.error))
            metrics.edge.finished(operation, seen.so_far_s, seen.error)
