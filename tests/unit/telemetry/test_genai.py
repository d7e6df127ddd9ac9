"""Span names and attributes as the GenAI conventions have them."""

from __future__ import annotations

from pdbus.messages.common import Sampling
from pdbus.telemetry import request_attributes, response_attributes, span_name


def test_a_span_is_named_after_operation_and_model() -> None:
    assert span_name("chat", "m") == "chat m"


def test_what_was_asked_for() -> None:
    found = request_attributes("chat", "m", Sampling(temperature=0.5, top_k=7), max_tokens=9, seed=3, stream=True)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "m"
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.request.top_k"] == 7
    assert found["gen_ai.request.max_tokens"] == 9
    assert found["gen_ai.request.seed"] == 3
    assert found["gen_ai.request.stream"] is True


def test_what_was_not_asked_for_is_not_told() -> None:
    found = request_attributes("chat", "m", Sampling(), max_tokens=9)
    assert not {"gen_ai.request.seed", "gen_ai.request.choice.count", "gen_ai.request.stop_sequences"} & found.keys()


def test_what_was_answered_names_its_version() -> None:
    found = response_attributes(
        "m", id="x", root="ab" * 32, finish_reasons=["stop"], input_tokens=5, output_tokens=2, cached_tokens=4
    )
    assert found["gen_ai.usage.input_tokens"] == 5
    assert found["gen_ai.usage.output_tokens"] == 2
    assert found["gen_ai.usage.cache_read.input_tokens"] == 4
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert found["pdbus.root"] == "ab" * 32
