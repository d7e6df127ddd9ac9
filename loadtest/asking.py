"""Asks a running stack for completions of exact size, one after another or at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import aiohttp

from loadtest.client import Observation, ask
from loadtest.prompts import completion
from loadtest.stack import Stack

_ANSWER_S = 300.0


class Failed(Exception):
    """An answer that a measurement rests on failed."""


async def at_once(
    http: aiohttp.ClientSession, stack: Stack, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[Observation]:
    """All answers, asked for at the same moment, which is their moment 0. Raises Failed if one fails."""
    model, url, start = stack.model, stack.url, time.perf_counter()
    bodies = [completion(model, list(prompt), new_tokens) for prompt in prompts]
    answers = await asyncio.gather(*(ask(http, url, body, 0.0, start, _ANSWER_S) for body in bodies))
    for answer in answers:
        if answer.error or not answer.chunks_s:
            raise Failed(f"an answer failed: {answer.error or 'it has no text'}")
    return answers


async def one(http: aiohttp.ClientSession, stack: Stack, prompt: Sequence[int], new_tokens: int) -> Observation:
    """As `at_once`, for one prompt."""
    return (await at_once(http, stack, [prompt], new_tokens))[0]
