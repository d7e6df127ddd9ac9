"""POST /v1/embeddings: what is refused, and how that is told."""

from __future__ import annotations

from typing import Any

import aiohttp
import openai
import pytest

from pdbus.errors import Unavailable
from tests.support.encoder_rig import MODEL, EncoderRig, ask
from tests.support.encoders import MOST_TOKENS, VOCAB_SIZE
from tests.support.router_rig import rig as chat_rig


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"input": []}, 400, "invalid_request", "input"),
        ({"input": ""}, 400, "invalid_request", "input"),
        ({"input": ["a", ""]}, 400, "invalid_request", "input"),
        ({"input": [[]]}, 400, "invalid_request", "input"),
        ({"input": ["a", 5]}, 400, "invalid_request", "input"),
        ({"input": [VOCAB_SIZE]}, 400, "invalid_request", "input"),
        ({"input": [5] * (MOST_TOKENS + 1)}, 400, "context_length_exceeded", "input"),
        ({"input": "fox " * MOST_TOKENS}, 400, "context_length_exceeded", "input"),
        ({"input": ["a"] * 2049}, 400, "invalid_request", "input"),
        ({"input": "a", "dimensions": 16}, 400, "invalid_request", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, 400, "invalid_request", "encoding_format"),
        ({"input": "a", "unknown": 1}, 400, "invalid_request", "unknown"),
        ({}, 400, "invalid_request", None),
        ({"model": "another", "input": "a"}, 404, "model_not_found", "model"),
        ({"model": f"{MODEL}@nothing", "input": "a"}, 404, "model_not_found", "model"),
    ],
)
async def test_errors(
    http: aiohttp.ClientSession, r: EncoderRig, body: dict[str, Any], status: int, code: str, param: str | None
):
    got, answer, _ = await ask(http, **body)
    assert (got, answer["error"]["code"]) == (status, code)
    assert answer["error"]["param"] == param or param is None
    assert not r.texts


async def test_a_text_as_long_as_the_model_takes_is_taken(http: aiohttp.ClientSession, r: EncoderRig):
    status, answer, _ = await ask(http, input=[[5] * MOST_TOKENS])
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == MOST_TOKENS


async def test_chat_with_an_encoder_and_embeddings_of_a_chat_model_are_refused_with_the_reason(
    client: openai.AsyncOpenAI,
):
    with pytest.raises(openai.BadRequestError, match="embeds texts: use /v1/embeddings"):
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(openai.BadRequestError, match="embeds texts"):
        await client.completions.create(model=MODEL, prompt="hello")
    async with chat_rig() as chat, openai.AsyncOpenAI(base_url=chat.url + "/v1", api_key="any") as other:
        with pytest.raises(openai.BadRequestError, match="writes text: it gives no embeddings"):
            await other.embeddings.create(model="toy", input="hello")


async def test_without_a_worker_it_is_said_so_retryably(http: aiohttp.ClientSession, r: EncoderRig):
    r.workers[0].refuse = Unavailable("gone")
    status, answer, _ = await ask(http, {"X-Request-Timeout-Ms": "200"}, input="a")
    assert (status, answer["error"]["type"]) == (504, "timeout_error")
