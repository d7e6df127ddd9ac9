"""Thousands of inputs of each kind, in processes that are watched as `python -m loadtest fuzz` watches them."""

from __future__ import annotations

import pytest

from loadtest.fuzz.supervise import fuzz

INPUTS = {
    "http": 4000, "jobs": 3000, "nats": 4000, "twin": 4000, "bulk": 10_000, "forms": 5000, "gguf": 2000,
    "safetensors": 3000, "meta": 2000, "stored": 2000, "peers": 3000, "streams": 1000,
}  # fmt: skip
GROWN_BYTES = 48 << 20
"""Caches that have a bound fill up to it; what grows with the inputs would be far above."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", INPUTS)
def test_nothing_crashes_hangs_or_grows(kind: str) -> None:
    result = fuzz(kind, INPUTS[kind], seed=5)
    assert result.sound, result.told
    assert result.inputs == INPUTS[kind]
    assert result.grown_bytes < GROWN_BYTES
