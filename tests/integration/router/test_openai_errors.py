"""What the official client makes of errors, refusals and streams that break off."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from loadtest.simulated_version import CONTEXT_TOKENS
from pdbus.errors import Overloaded
from tests.support.http_front import CHAT
from tests.support.router_rig import MODEL, Rig, rig, until


async def test_models(client: openai.AsyncOpenAI, r: Rig):
    listed = [model.id async for model in client.models.list()]
    assert listed == [MODEL, f"{MODEL}@stable"]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("another")


@pytest.mark.parametrize(
    ("fields", "cls", "code", "param"),
    [
        ({"model": "another"}, openai.NotFoundError, "model_not_found", "model"),
        ({"model": f"{MODEL}@nothing"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": 9}, openai.BadRequestError, "invalid_request", "temperature"),
        ({"max_tokens": CONTEXT_TOKENS}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
        (
            {"messages": [{"role": "user", "content": "x" * 600}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 500_000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            None,
        ),
        ({"logit_bias": {"4000": 1}}, openai.BadRequestError, "invalid_request", "logit_bias"),
        ({"messages": []}, openai.BadRequestError, "invalid_request", "messages"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            openai.BadRequestError,
            "invalid_request",
            "tools",
        ),
    ],
)
async def test_errors(
    client: openai.AsyncOpenAI, fields: Any, cls: type[openai.APIStatusError], code: str, param: str | None
):
    for stream in (False, True):
        with pytest.raises(cls) as caught:
            await client.chat.completions.create(**CHAT | fields, stream=stream)
        assert caught.value.code == code
        assert param is None or caught.value.param == param
        assert caught.value.type == "invalid_request_error"


async def test_the_client_tries_again_where_it_helps(r: Rig):
    r.router.frontend.admission.close()
    async with openai.AsyncOpenAI(base_url=r.url + "/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**CHAT)
    assert caught.value.response.headers["x-should-retry"] == "true"
    assert int(caught.value.response.headers["Retry-After"]) >= 1


async def test_too_many_requests():
    async with rig(max_inflight=1, max_queued=0) as r:
        for worker in r.workers:
            worker.behaviour.mute = True
        async with openai.AsyncOpenAI(base_url=r.url + "/v1", api_key="any", max_retries=0) as client:
            first = asyncio.create_task(client.chat.completions.create(**CHAT))
            await until(lambda: r.router.frontend.admission.running == 1)
            for _ in range(2):
                with pytest.raises(openai.RateLimitError) as refused:
                    await client.chat.completions.create(**CHAT)
                assert int(refused.value.response.headers["Retry-After"]) >= 1
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await r.until_idle()


async def test_an_error_in_mid_stream_is_raised(client: openai.AsyncOpenAI, r: Rig):
    for worker in r.workers:
        worker.behaviour.fail_at = 3
    told = 0
    while not told:  # on a busy machine the deadline may come before any token
        with pytest.raises(openai.APIError):  # noqa: PT012 - it comes while the stream is read
            async for _ in await client.chat.completions.create(**CHAT, stream=True, extra_body={"timeout": 0.6}):
                told += 1


async def test_cancelling_a_stream(client: openai.AsyncOpenAI, r: Rig):
    for worker in r.workers:
        worker.behaviour.step_s = 0.02
    stream = await client.chat.completions.create(**CHAT | {"max_tokens": 400}, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await r.until_idle()


async def test_overload_of_the_workers_ends_with_the_deadline(client: openai.AsyncOpenAI, r: Rig):
    r.prefills[0].behaviour.refuse = Overloaded("full")
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(**CHAT, extra_headers={"X-Request-Timeout-Ms": "300"})
    assert caught.value.status_code == 504
