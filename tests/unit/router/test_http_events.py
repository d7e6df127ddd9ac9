"""Streamed events say the same as the objects that they stand for, whatever is encoded in advance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pdbus.context import Deadline
from pdbus.router.answer import Answer
from pdbus.router.http_events import events
from pdbus.router.openai_schema import Endpoint, GenerateRequest, parse_builtins
from pdbus.router.output import ChoiceOutput, Delta
from pdbus.router.prompts import Encoded
from pdbus.router.telling import chunks
from pdbus.router.version import Version

TEXTS = ("a", '"', "\\", "\n\n", 'data: {"text":"."}', "ü\u2028🙂", "", "\x00\x7f", "z")


def _request(endpoint: Endpoint, **fields: object) -> GenerateRequest:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    if endpoint == "completions":
        asked = {"prompt": "x"}
    return parse_builtins(endpoint, asked | {"model": '{"text":"."} "content":"."', "stream": True} | fields)


def _answer(request: GenerateRequest) -> Answer:
    """Of two choices whose texts alternate."""
    version = SimpleNamespace(root=b"r" * 32, tokenizer=SimpleNamespace(bytes={}))
    answer = Answer("id", request, cast(Version, version), [Encoded((1, 2), "x")], Deadline.after(60))
    made = [ChoiceOutput(choice, cast(Any, {}), answer.emit, most_tokens=99) for choice in range(request.n)]
    answer.outputs = made
    answer.created = 1
    return answer


def _emit(answer: Answer) -> None:
    for text in TEXTS:
        for choice in range(answer.request.n):
            answer.emit(Delta(choice, text, ids=(len(text),)))
    for choice in range(answer.request.n):
        answer.emit(Delta(choice, "end", finish="stop"))


@pytest.mark.parametrize("endpoint", ["completions", "chat.completions"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"return_token_ids": True},
    ],
)
async def test_every_event_is_its_chunk(endpoint: Endpoint, fields: dict[str, object]):
    request = _request(endpoint, **fields)
    async with _answer(request) as answer:
        _emit(answer)
        wanted = [msgspec.json.encode(chunk) async for batch in chunks(answer) for chunk in batch]
    async with _answer(request) as answer:
        _emit(answer)
        told = b"".join([piece async for piece in events(answer)])
    assert told == b"".join(b"data: %b\n\n" % chunk for chunk in [*wanted, b"[DONE]"])
    assert len(wanted) >= (len(TEXTS) + 1) * request.n


async def test_the_last_events_come_with_the_end_and_are_known_as_such():
    async with _answer(_request("completions", stream_options={"include_usage": True})) as answer:
        telling = aiter(events(answer))
        answer.emit(Delta(0, "a"))
        first = await anext(telling)
        assert not answer.told
        answer.emit(Delta(0, "b", finish="stop"))
        last = await anext(telling)
        assert answer.told
        assert b"DONE" not in first
        assert last.count(b"data: ") == 3
        assert last.endswith(b"data: [DONE]\n\n")
        with pytest.raises(StopAsyncIteration):
            await anext(telling)
