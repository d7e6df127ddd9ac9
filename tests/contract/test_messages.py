"""Every subject's messages: they survive the wire, newer fields are ignored, and garbage is an InvalidRequest."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdbus.bus.codec import decode, encode
from pdbus.errors import InvalidRequest, WireError
from pdbus.messages import bulk
from pdbus.messages import decode as decode_messages
from pdbus.messages.router import TokenFrame
from pdbus.subject_tokens import decode_token, encode_token
from pdbus.subjects import (
    ANY,
    Bulk,
    Event,
    Log,
    Rpc,
    StreamRpc,
    Subject,
    Work,
    all_subjects,
)
from tests.support.wire_values import instances

SUBJECTS = all_subjects()

WIRE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=10)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


def messages_of(subject: Subject) -> list[type[Any]]:
    match subject:
        case Rpc() | StreamRpc():
            return [subject.request, subject.reply]
        case Event() | Log() | Work():
            return [subject.message]
        case Bulk():
            return []
    raise AssertionError(f"{subject} has a kind that this test does not know")


WIRE_TYPES = sorted(
    {message for subject in SUBJECTS.values() for message in messages_of(subject)}
    | {WireError, bulk.BlockHead, bulk.StagedHead, bulk.KvHead, bulk.CacheHead, decode_messages.KvFinal},
    key=lambda cls: cls.__qualname__,
)


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_subject_s_tokens_come_back(name: str) -> None:
    subject = SUBJECTS[name]
    wanted = {key: f"{key}.ä *>%" for key in (subject.tokens(subject.template) or {})}
    concrete = subject.name(**wanted)
    assert subject.tokens(concrete) == wanted
    assert concrete.isascii()
    assert concrete.count(".") == subject.template.count(".")
    assert not set(" *>\r\n") & set(concrete)


def test_no_two_subjects_overlap() -> None:
    names = {
        key: subject.name(**dict.fromkeys(subject.tokens(subject.template) or {}, "x"))
        for key, subject in SUBJECTS.items()
    }
    for key, subject in SUBJECTS.items():
        others = [other for other in names if other != key and subject.tokens(names[other]) is not None]
        assert others == []


@given(st.text(min_size=1))
def test_a_token_comes_back(text: str) -> None:
    try:
        token = encode_token(text)
    except UnicodeEncodeError:
        return  # a lone surrogate is no text
    assert decode_token(token) == text
    assert ANY not in token
    assert not {".", ">", " "} & set(token)


@pytest.mark.parametrize("name", ["*", ">", "a.b", "*.*", "a b", "\r\nPUB x 0"])
def test_a_name_that_a_caller_sends_is_never_a_wildcard_nor_a_level(name: str) -> None:
    for subject in SUBJECTS.values():
        named = subject.name(**dict.fromkeys(subject.wanted, name))
        assert subject.tokens(named) == dict.fromkeys(subject.wanted, name)
        assert not {"*", ">", " "} & set(named)


@pytest.mark.parametrize("cls", WIRE_TYPES, ids=lambda cls: cls.__qualname__)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_message_survives_the_wire_and_newer_fields_are_ignored(cls: type[Any], data: st.DataObject) -> None:
    message = data.draw(instances(cls))
    wire = encode(message)
    assert decode(cls, wire) == message
    newer = msgpack.unpackb(wire) | {"a_field_of_tomorrow": [1, {"x": None}]}
    assert decode(cls, msgpack.packb(newer)) == message


@pytest.mark.parametrize("cls", WIRE_TYPES, ids=lambda cls: cls.__qualname__)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_garbage_is_an_invalid_request_or_a_message(cls: type[Any], data: st.DataObject) -> None:
    names = [field.name for field in dataclasses.fields(cls)] or ["x"]
    garbage = data.draw(
        st.binary(max_size=80)
        | WIRE.map(msgpack.packb)
        | st.dictionaries(st.sampled_from(names), WIRE, max_size=len(names)).map(msgpack.packb)
    )
    with suppress(InvalidRequest):
        assert isinstance(decode(cls, garbage), cls)


@pytest.mark.parametrize("cls", WIRE_TYPES, ids=lambda cls: cls.__qualname__)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_message_is_an_invalid_request_or_a_message(cls: type[Any], data: st.DataObject) -> None:
    wire = bytearray(encode(data.draw(instances(cls))))
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] = data.draw(st.integers(0, 255))
    for garbage in (bytes(wire), bytes(wire[:at])):
        with suppress(InvalidRequest):
            assert isinstance(decode(cls, garbage), cls)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x81\xa4body" + b"\x81\xa1a" * 2000 + b"\x01",  # nested deeper than any stack
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million items
        b"\xdf\xff\xff\xff\xff\x01",
        b"\xc6\xff\xff\xff\xff\x01",
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\xc7\x03\x05abc",  # an extension
        b"\x81\x01\x02",  # a key that is no text
        b"\x80\x80",  # two messages
    ],
)
def test_hostile_bytes_are_an_invalid_request(garbage: bytes) -> None:
    for cls in WIRE_TYPES:
        if dataclasses.fields(cls):
            with pytest.raises(InvalidRequest):
                decode(cls, garbage)


def test_the_wrong_field_is_named() -> None:
    wire = msgpack.packb({"worker": "w", "incarnation": "i", "seq": 1, "items": [{"request_id": 5}]})
    with pytest.raises(InvalidRequest) as caught:
        decode(TokenFrame, wire)
    assert caught.value.param == "items[0].request_id"
