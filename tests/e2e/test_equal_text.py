"""Equal text (DESIGN.md section 6): a request alone and among fifteen others, with small and large prefill chunks, with
its prefix cached and not, in fp32. A first difference counts as a tie only where the two best are closer than ε."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest

from tests.support.equal_text import PROMPTS, alone, assert_equal_text, together
from tests.support.stack import APART, FP32, Stack, running_stack


@pytest.fixture(scope="module")
def small_chunks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("chunks"), *APART, env={**FP32, "PDBUS_CHUNK_TOKENS": "16"}) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_alone_together_cached_and_in_small_chunks(stack: Stack, small_chunks: Stack) -> None:
    cold = await alone(stack, PROMPTS)
    # Nothing shared but by chance; one that was begun anew elsewhere finds what it had read before.
    assert statistics.median(answer.cached_tokens for answer in cold) < 16
    warm = await alone(stack, PROMPTS[:4])
    assert min(answer.cached_tokens for answer in warm) >= 32
    assert_equal_text(cold[:4], warm)
    assert_equal_text(cold, await together(stack, PROMPTS))
    assert_equal_text(cold, await together(small_chunks, PROMPTS))
    assert_equal_text(cold[:4], await alone(small_chunks, PROMPTS[:4]))
