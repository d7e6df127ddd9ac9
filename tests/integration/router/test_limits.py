"""Every bound on a request has a clear 4xx, whatever stands beyond it, and costs the router next to nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.support.completing import completion
from tests.support.router_rig import MODEL, Rig, rig

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
GOOD = json.dumps(completion()).encode()


@pytest.fixture
async def r() -> AsyncIterator[Rig]:
    async with rig() as made:
        yield made
        assert not any(worker.tickets for worker in made.workers), "nothing of it reached a worker"


async def post(r: Rig, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession(r.url, max_line_size=100_000) as http:
        sent = {"Content-Type": "application/json"} | headers
        async with http.post(path, data=body, headers=sent, expect100=False) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else {}


def _chat(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}]} | fields).encode()


def _completion(**fields: Any) -> bytes:
    return json.dumps(completion(**fields)).encode()


BEYOND: dict[str, tuple[str, bytes]] = {
    "n": (CHAT, _chat(n=33)),
    "choices of all prompts": (COMPLETIONS, _completion(prompt=["x"] * 65)),
    "n times prompts": (COMPLETIONS, _completion(prompt=["x"] * 9, n=8)),
    "stop strings": (CHAT, _chat(stop=["x"] * 17)),
    "a stop string": (CHAT, _chat(stop="x" * 257)),
    "stop ids": (CHAT, _chat(stop_token_ids=list(range(65)))),
    "logit biases": (CHAT, _chat(logit_bias={str(i): 1 for i in range(1025)})),
    "a logit bias": (CHAT, _chat(logit_bias={"1": 101})),
    "top logprobs": (CHAT, _chat(logprobs=True, top_logprobs=21)),
    "messages": (CHAT, _chat(messages=[{"role": "user", "content": "x"}] * 4097)),
    "parts of a message": (CHAT, _chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}])),
    "metadata": (CHAT, _chat(metadata={str(i): "" for i in range(17)})),
    "user": (CHAT, _chat(user="x" * 513)),
    "model": (CHAT, _chat(model="x" * 257)),
    "timeout": (CHAT, _chat(timeout=601)),
    "inputs": (EMBEDDINGS, json.dumps({"model": MODEL, "input": ["x"] * 2049}).encode()),
    "depth of lists": (CHAT, b'{"model":"toy","messages":[],"tools":' + b"[" * 500_000 + b"]" * 500_000 + b"}"),
    "depth of objects": (
        CHAT,
        b'{"model":"toy","messages":[],"metadata":' + b'{"a":' * 200_000 + b"}" * 200_000 + b"}",
    ),
    "depth without an end": (CHAT, b'{"model":"toy","tools":' + b"[" * 2_000_000),
    "a number": (CHAT, b'{"model":"toy","seed":' + b"9" * 1_000_000 + b"}"),
}


@pytest.mark.parametrize(("path", "body"), BEYOND.values(), ids=BEYOND)
async def test_beyond_a_bound_of_the_body(r: Rig, path: str, body: bytes) -> None:
    begun = time.process_time()
    status, answer = await post(r, path, body)
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert len(answer["error"]["message"]) < 500
    assert time.process_time() - begun < 2


async def test_a_body_that_is_too_large_packed_or_not(r: Rig) -> None:
    large = _completion(prompt="x" * (5 << 20))
    assert (await post(r, COMPLETIONS, large))[0] == 413
    bomb = gzip.compress(bytes(60 << 20), 1)
    assert len(bomb) < 1 << 20
    assert (await post(r, COMPLETIONS, bomb, **{"Content-Encoding": "gzip"}))[0] == 413
    for encoding in ("br", "zstd", "deflate", "gzip, gzip", "x" * 1000):
        status, answer = await post(r, COMPLETIONS, GOOD, **{"Content-Encoding": encoding})
        assert status == 415
        assert len(answer["error"]["message"]) < 200


@pytest.mark.parametrize("name", ["Authorization", "X-Other", "Idempotency-Key", "X-Session-Id", "traceparent"])
async def test_a_header_that_is_too_long(r: Rig, name: str) -> None:
    status, _ = await post(r, COMPLETIONS, GOOD, **{name: "x" * 20_000})
    assert 400 <= status < 500


async def test_a_head_that_is_too_long(r: Rig) -> None:
    status, _ = await post(r, COMPLETIONS, GOOD, **{f"X-{number}": "x" * 7000 for number in range(200)})
    assert 400 <= status < 500


async def test_a_wrong_value_is_not_repeated_at_length(r: Rig) -> None:
    status, answer = await post(r, CHAT, _chat(service_tier="x" * 100_000))
    assert (status, answer["error"]["param"]) == (400, "service_tier")
    assert len(answer["error"]["message"]) < 500


@pytest.mark.parametrize("value", ["200-ok", "\ud800", "x" * 2000])
async def test_what_else_than_to_continue_is_expected(r: Rig, value: str) -> None:
    reader, writer = await asyncio.open_connection(*r.url.removeprefix("http://").split(":"))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nExpect: {value}\r\nContent-Length: 0\r\n\r\n"
    writer.write(head.encode("utf-8", "surrogatepass"))
    told = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert " 417 " in told.splitlines()[0]
    writer.close()


@pytest.mark.parametrize(("name", "value"), [
    ("Idempotency-Key", "x" * 256), ("X-Request-Timeout-Ms", "-1"), ("X-Request-Timeout-Ms", "1e3"),
])  # fmt: skip
async def test_a_header_that_says_what_can_not_be(r: Rig, name: str, value: str) -> None:
    status, answer = await post(r, COMPLETIONS, GOOD, **{name: value})
    assert (status, answer["error"]["param"]) == (400, name)
