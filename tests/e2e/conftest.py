"""One real stack on the default model for all end-to-end tests of a session, traced into a receiver of ours.

In fp32: what it answers is held against an independent implementation. test_default_precision.py has the default."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.otlp import Receiver, otlp_receiver
from tests.support.stack import APART, FP32, Stack, running_stack


@pytest.fixture(scope="session")
def traces() -> Iterator[Receiver]:
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, traces: Receiver) -> Iterator[Stack]:
    env = {**FP32, "OTEL_EXPORTER_OTLP_ENDPOINT": traces.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with running_stack(tmp_path_factory.mktemp("stack"), *APART, env=env) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=100) as client:
        yield client
