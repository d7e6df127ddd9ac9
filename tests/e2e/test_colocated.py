"""Workers that read their prompts themselves: the same text as with a hand-over, and nobody else is needed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.support.equal_text import PROMPTS, alone, assert_equal_text, together
from tests.support.stack import APART, FP32, Stack, running_stack

INT8 = ("--precision", "int8", "--kv-dtype", "int8")


@contextmanager
def colocated(folder: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Stack]:
    with running_stack(folder, "--colocated", *options, env=env) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_same_text_as_with_a_hand_over(stack: Stack, tmp_path: Path) -> None:
    prompts = [f"Colocated. {prompt}" for prompt in PROMPTS[:4]]
    with colocated(tmp_path / "fp32", env=FP32) as whole:
        cold = await together(whole, prompts)
        assert_equal_text(await alone(stack, prompts), cold)
        warm = await alone(whole, prompts)
        assert min(answer.cached_tokens for answer in warm) >= 32
        assert_equal_text(cold, warm)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_in_int8_to_the_token_and_a_worker_that_is_killed_costs_none(tmp_path: Path) -> None:
    with running_stack(tmp_path / "apart", *APART, *INT8) as apart:
        handed_over = await alone(apart, PROMPTS[:3])
    with colocated(tmp_path / "whole", "--decode", "2", *INT8) as whole:
        assert [one.ids for one in await together(whole, PROMPTS[:3])] == [one.ids for one in handed_over]
        cached = 0
        async with asyncio.timeout(60):  # whoever of the two has read it is asked again, once the burst is over
            while cached < 32:
                again = await alone(whole, PROMPTS[:3])
                assert [one.ids for one in again] == [one.ids for one in handed_over]
                cached = min(one.cached_tokens for one in again)
        assert not any(name.startswith("prefill") for name in whole.pids())
        body = {"model": whole.model, "prompt": PROMPTS[5], "max_tokens": 120, "temperature": 0, "ignore_eos": True}
        expected = await _text(whole, body, None)
        for worker in ("decode-1", "decode-2"):  # whoever writes it: one of the two is hit
            assert await _text(whole, body, whole.pids()[worker]) == expected


async def _text(stack: Stack, body: dict[str, object], kill: int | None) -> str:
    """A streamed answer; after its tenth piece the process `kill` is killed."""
    text, pieces = "", 0
    headers = {"Cache-Control": "no-cache, no-store"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{stack.url}/v1/completions", json=body | {"stream": True}, headers=headers) as response,
    ):
        async for line in response.content:
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                pieces += 1
                if kill is not None and pieces == 10:
                    os.kill(kill, signal.SIGKILL)
    return text
