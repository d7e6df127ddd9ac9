"""Equal text (DESIGN.md section 6), asked of whole stacks: a first difference counts as a tie only where the two best
are closer than ε."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from tests.support.stack import Stack

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


async def ask(http: aiohttp.ClientSession, stack: Stack, prompt: str) -> Answer:
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


async def alone(stack: Stack, prompts: Sequence[str]) -> list[Answer]:
    async with aiohttp.ClientSession() as http:
        return [await ask(http, stack, prompt) for prompt in prompts]


async def together(stack: Stack, prompts: Sequence[str]) -> list[Answer]:
    async with aiohttp.ClientSession() as http:
        return await asyncio.gather(*(ask(http, stack, prompt) for prompt in prompts))


def assert_equal_text(reference: Sequence[Answer], found: Sequence[Answer]) -> None:
    for expected, got in zip(reference, found, strict=True):
        differing = [at for at, (a, b) in enumerate(zip(expected.ids, got.ids, strict=False)) if a != b]
        if differing:
            assert expected.margins[differing[0]] < EPSILON, f"text differs at token {differing[0]}, and not by a tie"
        else:
            assert expected.ids == got.ids
