"""Names and attributes of the OpenTelemetry conventions for generative AI (open-telemetry/semantic-conventions-genai).

Prompts and answers are never recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.util.types import AttributeValue

from pdbus.messages.common import Sampling
from pdbus.telemetry.spans import meter

_PROVIDER = "pdbus"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

Attributes = dict[str, AttributeValue]


def span_name(operation: str, model: str) -> str:
    """`chat smollm2-135m-instruct`; the operations are `chat`, `text_completion` and `embeddings`."""
    return f"{operation} {model}"


def request_attributes(
    operation: str,
    model: str,
    sampling: Sampling,
    *,
    max_tokens: int,
    seed: int | None = None,
    choices: int = 1,
    stream: bool = False,
    stop: Sequence[str] = (),
) -> Attributes:
    """What is known of a request at admission."""
    found: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.stream": stream,
    }
    if seed is not None:
        found["gen_ai.request.seed"] = seed
    if choices != 1:
        found["gen_ai.request.choice.count"] = choices
    if stop:
        found["gen_ai.request.stop_sequences"] = list(stop)
    return found


def embedding_attributes(model: str, inputs: int, encoding: str) -> Attributes:
    """What is known of a request for embeddings at admission."""
    return {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.encoding_formats": [encoding],
        "pdbus.inputs": inputs,
    }


def response_attributes(
    model: str,
    *,
    id: str,
    root: str,
    finish_reasons: Sequence[str],
    input_tokens: int,
    output_tokens: int,
    cached_tokens: int = 0,
    first_chunk_s: float | None = None,
) -> Attributes:
    """What is known once the answer is whole. `root`: the version it was computed from, in hex."""
    found: Attributes = {
        "gen_ai.response.id": id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": list(finish_reasons),
        "gen_ai.usage.input_tokens": input_tokens,
        "gen_ai.usage.output_tokens": output_tokens,
        "gen_ai.usage.cache_read.input_tokens": cached_tokens,
        "pdbus.root": root,
    }
    if first_chunk_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = first_chunk_s
    return found


def _common(operation: str, model: str, error: str | None = None) -> Attributes:
    found: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": model,
    }
    if error is not None:
        found["error.type"] = error
    return found


class EdgeMetrics:
    """What the router measures of each request, from the caller's side."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._duration = meter().create_histogram(
            "gen_ai.client.operation.duration", "s", explicit_bucket_boundaries_advisory=_SECONDS
        )
        self._first_chunk = meter().create_histogram(
            "gen_ai.client.operation.time_to_first_chunk", "s", explicit_bucket_boundaries_advisory=_SECONDS
        )
        self._tokens = meter().create_histogram(
            "gen_ai.client.token.usage", "{token}", explicit_bucket_boundaries_advisory=_TOKENS
        )

    def finished(self, operation: str, duration_s: float, error: str | None = None) -> None:
        """One request ended; `error` is the code of a failed one."""
        self._duration.record(duration_s, _common(operation, self._model, error))

    def first_chunk(self, operation: str, seconds: float) -> None:
        self._first_chunk.record(seconds, _common(operation, self._model))

    def usage(self, operation: str, input_tokens: int, output_tokens: int | None = None) -> None:
        common = _common(operation, self._model)
        self._tokens.record(input_tokens, {**common, "gen_ai.token.type": "input"})
        if output_tokens is not None:
            self._tokens.record(output_tokens, {**common, "gen_ai.token.type": "output"})


class WorkerMetrics:
    """What prefill and decode workers measure. All times in seconds."""

    def __init__(self, model: str) -> None:
        self._common = _common("chat", model)
        self._duration = meter().create_histogram(
            "gen_ai.server.request.duration", "s", explicit_bucket_boundaries_advisory=_SECONDS
        )
        self._first = meter().create_histogram(
            "gen_ai.server.time_to_first_token", "s", explicit_bucket_boundaries_advisory=_SECONDS
        )
        self._per_token = meter().create_histogram(
            "gen_ai.server.time_per_output_token", "s", explicit_bucket_boundaries_advisory=_SECONDS
        )

    def finished(self, duration_s: float, error: str | None = None) -> None:
        self._duration.record(duration_s, self._common if error is None else {**self._common, "error.type": error})

    def first_token(self, seconds: float) -> None:
        """From acceptance by the prefill worker to its first token."""
        self._first.record(seconds, self._common)

    def per_output_token(self, seconds: float) -> None:
        """Mean over one answer's tokens after the first."""
        self._per_token.record(seconds, self._common)
