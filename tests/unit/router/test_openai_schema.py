"""What the two bodies may hold, and what a caller is told of everything else."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.caching.result_key import RESULT_FIELDS
from pdbus.errors import InvalidRequest
from pdbus.router.openai_schema import ChatMessage, GenerateRequest, parse_builtins, parse_json
from pdbus.router.results import JOINS, NEUTRAL, RESOLVED, key_of

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> GenerateRequest:
    return parse_json("chat.completions", json.dumps(CHAT | fields).encode())


def completion(**fields: Any) -> GenerateRequest:
    return parse_json("completions", json.dumps(COMPLETION | fields).encode())


def test_absent_stays_absent():
    request = chat()
    assert request.temperature is None
    assert request.seed is None
    assert not request.deterministic
    assert request.sampling.temperature == 1.0


def test_null_is_absent_as_clients_send_it():
    assert chat(temperature=None, stop=None, tools=None, response_format=None, max_tokens=None, seed=None) == chat()


def test_what_openai_clients_send_is_accepted_and_changes_nothing():
    neutral = {
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "n": 1,
        "logprobs": False,
    }
    assert chat(**neutral) == chat()
    assert completion(best_of=2, n=2, suffix="") == completion(n=2)


def test_the_user_is_known_and_changes_nothing_that_is_answered():
    assert chat(user="u") == dataclasses.replace(chat(), user="u")


def test_contents_of_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages == (ChatMessage("user", "ab"),)


def test_an_assistants_message_may_be_sent_back_as_it_came():
    message = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "audio": None,
    }
    assert chat(messages=[message]).messages == (ChatMessage("assistant", "x"),)


def test_developer_is_the_newer_name_of_system():
    assert chat(messages=[{"role": "developer", "content": "x"}]).messages == (ChatMessage("system", "x"),)


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3))), ("", ("",))],
)
def test_forms_of_a_prompt(prompt: Any, parsed: Any):
    assert completion(prompt=prompt).prompts == parsed


def test_a_version_is_named_after_the_model():
    assert (chat(model="m@canary").model, chat(model="m@canary").ref) == ("m", "canary")
    assert chat().ref is None


def test_logprobs_in_both_forms():
    assert chat(logprobs=True, top_logprobs=5).logprobs == 5
    assert chat(logprobs=True).logprobs == 0
    assert completion(logprobs=0).logprobs == 0
    assert completion().logprobs is None


def test_top_k_minus_one_is_off():
    assert chat(top_k=-1).sampling.top_k == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": 10**40}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"01": 1}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": "hi"}, "messages"),
        ({"temprature": 1}, "temprature"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"model": 5}, "model"),
        ({"timeout": 0}, "timeout"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1.5]]}, "prompt[0][0]"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ["a"] * 65}, "n"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.param == param


def test_min_tokens_is_taken_where_it_holds_anyway():
    assert completion(min_tokens=4, max_tokens=4, ignore_eos=True).ignore_eos
    with pytest.raises(InvalidRequest):
        completion(min_tokens=5, max_tokens=4, ignore_eos=True)
    with pytest.raises(InvalidRequest):
        completion(min_tokens=4, ignore_eos=True, stop="x")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"{}", b"[" * 100_000, b"\xff", b'{"model":NaN}', b"null"])
def test_broken_json_is_a_clear_error(body: bytes):
    with pytest.raises(InvalidRequest):
        parse_json("chat.completions", body)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_NAMES = st.sampled_from([*CHAT, *COMPLETION, "n", "stop", "logit_bias", "stream_options", "temperature", "seed"])


@given(st.dictionaries(_NAMES | st.text(max_size=8), _JSON, max_size=6), st.sampled_from([CHAT, COMPLETION]))
def test_any_body_is_parsed_or_refused_in_words(fields: dict[str, Any], base: dict[str, Any]):
    endpoint = "chat.completions" if base is CHAT else "completions"
    with contextlib.suppress(InvalidRequest):
        parse_builtins(endpoint, base | fields)


def test_every_field_joins_the_result_key_or_is_declared_otherwise():
    names = {field.name for field in dataclasses.fields(GenerateRequest)}
    assert names == set(JOINS) | RESOLVED | NEUTRAL
    assert set(JOINS.values()) | {"seed", "max_tokens"} <= RESULT_FIELDS.joins


def _key(request: GenerateRequest, **changed: Any) -> bytes:
    given = {
        "tenant": "t", "salt": b"s", "root": b"r" * 32, "compute_class": "c", "tokens": [(1, 2)], "limits": (5,),
        "seed": 1,
    } | changed  # fmt: skip
    return key_of(request, **given).key


_OTHER: dict[str, Any] = {
    "endpoint": "completions",
    "n": 2,
    "echo": True,
    "stop": ("x",),
    "stop_token_ids": (3,),
    "ignore_eos": True,
    "logit_bias": ((1, 1.0),),
    "logprobs": 0,
}


@pytest.mark.parametrize("name", sorted(JOINS))
def test_each_joining_field_changes_the_key(name: str):
    request = chat()
    assert _key(dataclasses.replace(request, **{name: _OTHER.get(name, 0.5)})) != _key(request)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "logprobs"])
def test_absent_is_not_the_default(name: str):
    request = chat()
    default = {"temperature": 1.0, "top_p": 1.0, "logprobs": 0}.get(name, 0)
    assert _key(dataclasses.replace(request, **{name: default})) != _key(request)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_neutral_fields_do_not_change_the_key(name: str):
    request = chat()
    assert _key(dataclasses.replace(request, **{name: True})) == _key(request)


@pytest.mark.parametrize(
    "changed",
    [
        {"tenant": "u"},
        {"salt": b"t"},
        {"root": b"s" * 32},
        {"compute_class": "d"},
        {"tokens": [(1,), (2,)]},
        {"limits": (6,)},
        {"seed": 2},
        {"seed": None},
    ],
)
def test_what_the_request_was_resolved_to_changes_the_key(changed: dict[str, Any]):
    assert _key(chat(), **changed) != _key(chat())


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1), min_size=1),
    st.lists(st.lists(st.integers(0, 9), min_size=1), min_size=1),
)
def test_no_two_lists_of_prompts_share_a_key(one: list[list[int]], other: list[list[int]]):
    request = completion()
    assert (_key(request, tokens=one) == _key(request, tokens=other)) == (one == other)
