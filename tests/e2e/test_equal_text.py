"""Equal text (DESIGN.md section 6): a request alone and among fifteen others, with small and large prefill chunks, with
its prefix cached and not, in fp32. A first difference counts as a tie only where the two best are closer than ε."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp
import pytest

from tests.support.stack import FP32, Stack, running_stack

EPSILON = 2e-3
TOPICS = (
    "a lock,a steam engine,the moon's pull on the sea,a radio,bread rising,a violin,a compass,yeast,a mirror,a bicycle,"
    "the heart,a volcano,a bridge,snow,an echo,a clock"
).split(",")
PROMPTS = [
    f"Question {number}: explain in plain words how {topic} works, step by step, to a curious child. " * 3
    for number, topic in enumerate(TOPICS)
]


@dataclass(frozen=True)
class Answer:
    ids: tuple[int, ...]
    margins: tuple[float, ...]
    """At each token: how far the best was ahead of the second."""
    cached_tokens: int


@pytest.fixture(scope="module")
def small_chunks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("chunks"), env={**FP32, "PDBUS_CHUNK_TOKENS": "16"}) as running:
        yield running


async def _ask(http: aiohttp.ClientSession, stack: Stack, prompt: str) -> Answer:
    body = {
        "model": stack.model,
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": 2,
        "return_token_ids": True,
    }
    headers = {"Cache-Control": "no-cache, no-store"}  # the result cache is not what is tested here
    async with http.post(f"{stack.url}/v1/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
    choice = answer["choices"][0]
    best = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
    margins = tuple(values[0] - values[1] for values in best)
    return Answer(tuple(choice["token_ids"]), margins, answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def _alone(stack: Stack, prompts: Sequence[str]) -> list[Answer]:
    async with aiohttp.ClientSession() as http:
        return [await _ask(http, stack, prompt) for prompt in prompts]


async def _together(stack: Stack, prompts: Sequence[str]) -> list[Answer]:
    async with aiohttp.ClientSession() as http:
        return await asyncio.gather(*(_ask(http, stack, prompt) for prompt in prompts))


def _assert_equal_text(reference: Sequence[Answer], found: Sequence[Answer]) -> None:
    for expected, got in zip(reference, found, strict=True):
        differing = [at for at, (a, b) in enumerate(zip(expected.ids, got.ids, strict=False)) if a != b]
        if differing:
            assert expected.margins[differing[0]] < EPSILON, f"text differs at token {differing[0]}, and not by a tie"
        else:
            assert expected.ids == got.ids


@pytest.mark.timeout(400)
async def test_alone_together_cached_and_in_small_chunks(stack: Stack, small_chunks: Stack) -> None:
    cold = await _alone(stack, PROMPTS)
    assert max(answer.cached_tokens for answer in cold) < 16  # nothing shared but by chance
    warm = await _alone(stack, PROMPTS[:4])
    assert min(answer.cached_tokens for answer in warm) >= 32
    _assert_equal_text(cold[:4], warm)
    _assert_equal_text(cold, await _together(stack, PROMPTS))
    _assert_equal_text(cold, await _together(small_chunks, PROMPTS))
    _assert_equal_text(cold[:4], await _alone(small_chunks, PROMPTS[:4]))
