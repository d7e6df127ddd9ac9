"""The official client, unchanged, against the real stack."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import openai
import pytest

from tests.support.idle import until_idle
from tests.support.stack import Stack

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def test_models_are_listed(client: openai.OpenAI, stack: Stack) -> None:
    assert client.models.list().data[0].id == stack.model


def test_a_whole_answer(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(model=stack.model, messages=QUESTION, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.system_fingerprint
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_streamed_answer_is_the_whole_one_in_pieces(client: openai.OpenAI, stack: Stack) -> None:
    ask: dict[str, Any] = {"model": stack.model, "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}


def test_without_usage_asked_for_no_chunk_has_it(client: openai.OpenAI, stack: Stack) -> None:
    chunks = list(client.chat.completions.create(model=stack.model, messages=QUESTION, max_tokens=4, stream=True))
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: openai.OpenAI, stack: Stack) -> None:
    ask: dict[str, Any] = {"model": stack.model, "messages": QUESTION, "temperature": 0, "stop": ["of Fra"]}
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].message.content == "The capital "
    assert whole.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "The capital "


def test_log_probabilities(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(
        model=stack.model, messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)  # greedy took the best
        assert [t.logprob for t in token.top_logprobs] == sorted((t.logprob for t in token.top_logprobs), reverse=True)


def test_several_choices_differ_and_repeat_by_seed(client: openai.OpenAI, stack: Stack) -> None:
    ask: dict[str, Any] = {
        "model": stack.model,
        "messages": [{"role": "user", "content": "Name an animal and a colour."}],
        "n": 3,
        "seed": 11,
        "temperature": 1.5,
        "max_tokens": 16,
    }
    first = client.chat.completions.create(**ask)
    again = client.chat.completions.create(**ask, extra_headers={"Cache-Control": "no-cache"})
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert [choice.message.content for choice in again.choices] == texts
    other = client.chat.completions.create(**ask | {"seed": 12})
    assert [choice.message.content for choice in other.choices] != texts


def test_sampling_fields_take_effect(client: openai.OpenAI, stack: Stack) -> None:
    ask: dict[str, Any] = {"model": stack.model, "messages": QUESTION, "max_tokens": 12}
    greedy = client.chat.completions.create(**ask, temperature=0).choices[0].message.content
    for field in ({"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}):
        assert (
            client.chat.completions.create(**ask, temperature=1, seed=5, **field).choices[0].message.content == greedy
        )
    banned = client.chat.completions.create(**ask, temperature=0, logit_bias={"504": -100}).choices[0].message.content
    assert greedy is not None
    assert greedy.startswith("The")
    assert banned is not None
    assert not banned.startswith("The")


def test_content_may_come_in_parts_and_the_limit_by_its_new_name(client: openai.OpenAI, stack: Stack) -> None:
    parts: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}],
        }
    ]
    answer = client.chat.completions.create(model=stack.model, messages=parts, temperature=0, max_completion_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_a_repeated_greedy_answer_comes_from_the_result_cache_alike(client: openai.OpenAI, stack: Stack) -> None:
    messages: list[Any] = [{"role": "user", "content": "Which result is kept?"}]
    ask: dict[str, Any] = {"model": stack.model, "messages": messages, "temperature": 0, "max_tokens": 24}
    told = client.chat.completions.with_raw_response.create(**ask)
    first = told.parse()
    end = time.monotonic() + 100
    while told.headers["x-result-cache"] != "hit" and time.monotonic() < end:  # it is written beside the answer
        told = client.chat.completions.with_raw_response.create(**ask)
    assert told.headers["x-result-cache"] == "hit"
    again = told.parse()
    assert again.choices == first.choices
    assert again.usage is not None
    assert first.usage is not None
    assert again.usage.completion_tokens == first.usage.completion_tokens


def test_a_batch_is_answered_as_the_endpoint_answers(client: openai.OpenAI, stack: Stack) -> None:
    ask: dict[str, Any] = {"model": stack.model, "messages": QUESTION, "temperature": 0, "max_tokens": 8}
    request = {"custom_id": "paris", "method": "POST", "url": "/v1/chat/completions", "body": ask}
    file = client.files.create(file=("in.jsonl", json.dumps(request).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "e2e"}
    )
    end = time.monotonic() + 100
    while batch.status in ("validating", "in_progress") and time.monotonic() < end:
        time.sleep(0.2)  # as callers do: nothing tells them
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    assert batch.output_file_id is not None
    (answer,) = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    direct = client.chat.completions.create(**ask)
    assert answer["custom_id"] == "paris"
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
    assert answer["response"]["body"]["system_fingerprint"] == direct.system_fingerprint


ERRORS = [
    ("an unknown model", {"model": "nobody"}, openai.NotFoundError, "model"),
    ("a wrong type", {"temperature": "hot"}, openai.BadRequestError, "temperature"),
    ("a value out of range", {"temperature": -1}, openai.BadRequestError, "temperature"),
    ("an unknown field", {"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature"),
    ("no messages", {"messages": []}, openai.BadRequestError, "messages"),
    ("an unknown role", {"messages": [{"role": "wizard", "content": "x"}]}, openai.BadRequestError, "role"),
    ("too many tokens asked for", {"max_tokens": 100_000}, openai.BadRequestError, "max_tokens"),
    (
        "an oversize prompt",
        {"messages": [{"role": "user", "content": "word " * 9000}]},
        openai.BadRequestError,
        "context",
    ),
    ("too many choices", {"n": 10_000}, openai.BadRequestError, "n"),
]


@pytest.mark.parametrize(("fields", "error", "names"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_errors_are_openais(
    client: openai.OpenAI, stack: Stack, fields: dict[str, Any], error: type[openai.APIStatusError], names: str
) -> None:
    body: dict[str, Any] = {"model": stack.model, "messages": QUESTION, "max_tokens": 4}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**body | fields)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "invalid_request_error"
    assert names in caught.value.message


async def _post(stack: Stack, **request: Any) -> tuple[int, Any]:
    timeout = aiohttp.ClientTimeout(total=100)
    url = f"{stack.url}/v1/chat/completions"
    async with aiohttp.ClientSession(timeout=timeout) as http, http.post(url, **request) as answer:
        return answer.status, await answer.json()


async def test_broken_json_is_told_as_such(stack: Stack) -> None:
    status, body = await _post(stack, data=b'{"model": ', headers={"Content-Type": "application/json"})
    assert status == 400
    assert "JSON" in body["error"]["message"]


async def test_a_deadline_in_the_past_is_refused(stack: Stack) -> None:
    ask = {"model": stack.model, "messages": QUESTION, "max_tokens": 4}
    status, body = await _post(stack, json=ask, headers={"X-Request-Timeout-Ms": "0"})
    assert 400 <= status < 500
    assert body["error"]["message"]


async def test_clients_that_leave_free_their_work(stack: Stack) -> None:
    """Twenty streams are dropped after their first chunk; what they held is free again within seconds."""
    async with aiohttp.ClientSession() as http:

        async def leave_early(number: int) -> None:
            body = {
                "model": stack.model,
                "messages": [{"role": "user", "content": f"Count from {number} to one thousand."}],
                "max_tokens": 1000,
                "stream": True,
                "ignore_eos": True,
            }
            # As late a deadline as there can be: so much in 120 s would rightly be refused on a slow machine.
            headers = {"X-Request-Timeout-Ms": "600000"}
            url = f"{stack.url}/v1/chat/completions"
            while True:
                async with http.post(url, json=body, headers=headers) as response:
                    if response.status != 429:
                        assert response.status == 200
                        await response.content.readline()
                        response.close()
                        return
                # On a very slow one there is room once others have left.
                await asyncio.sleep(float(response.headers["Retry-After"]))

        await asyncio.gather(*(leave_early(number) for number in range(20)))
    await until_idle(stack.nats_url, within_s=60)  # to be answered they would take longer
