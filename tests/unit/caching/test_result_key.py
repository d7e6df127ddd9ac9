"""The result key holds all that an answer depends on, and nothing can be forgotten."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pdbus.caching.result_key import RESULT_FIELDS, ResultKey, UndeclaredField, deterministic, result_key

BASE: dict[str, Any] = {
    "tenant": "anonymous",
    "model": "m",
    "root": b"\x01" * 32,
    "compute_class": "cpu fp32",
    "tokens": [1, 2, 3],
}
leaves = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3) | st.binary()
values = leaves | st.lists(leaves, max_size=3) | st.dictionaries(st.text(max_size=2), leaves, max_size=2)
joining = sorted(RESULT_FIELDS.required | RESULT_FIELDS.joins)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=4)
requests = st.builds(
    lambda given, tokens: BASE | given | {"tokens": tokens},
    st.dictionaries(st.sampled_from(joining), values, max_size=4),
    tokens,
)
pairs = st.tuples(requests, requests) | requests.map(lambda request: (request, dict(reversed(request.items()))))


def same(left: Any, right: Any) -> bool:
    """Equality that tells 1, 1.0 and True apart, as the key must."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


SALT = b"s" * 32


def key_of(fields: dict[str, Any], salt: bytes = SALT) -> ResultKey:
    return result_key(fields, salt)


def test_golden_vector() -> None:
    key = key_of(BASE | {"temperature": 0, "stop": ["\n"]})
    assert key.key == hmac.digest(SALT, key.material, hashlib.sha256)
    assert key.key.hex() == "dab31b90640daf8e41e8f2a8cf0ef00b83aaf15aea860df2cf2189a82808ba89"


@given(pair=pairs)
def test_different_requests_have_different_keys_and_equal_ones_the_same(
    pair: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    left, right = pair
    assert (key_of(left).key == key_of(right).key) == same(left, right)


@given(request=requests, data=st.data())
def test_swapping_two_fields_changes_the_key(request: dict[str, Any], data: st.DataObject) -> None:
    first, second = (data.draw(st.sampled_from(sorted(request.keys() - {"tokens"}))) for _ in range(2))
    assume(not same(request[first], request[second]))
    swapped = request | {first: request[second], second: request[first]}
    assert key_of(swapped).key != key_of(request).key


@given(request=requests, field=st.sampled_from(sorted(RESULT_FIELDS.joins)), value=values)
def test_an_absent_field_differs_from_every_value(request: dict[str, Any], field: str, value: Any) -> None:
    absent = {name: given for name, given in request.items() if name != field}
    assert key_of(absent).key != key_of(absent | {field: value}).key


@given(field=st.text(min_size=1, max_size=20))
def test_an_undeclared_field_is_refused(field: str) -> None:
    assume(field not in joining and field not in RESULT_FIELDS.neutral)
    with pytest.raises(UndeclaredField, match="neither"):
        key_of(BASE | {field: 1})


@pytest.mark.parametrize("field", sorted(RESULT_FIELDS.required))
def test_no_key_without_what_every_answer_depends_on(field: str) -> None:
    with pytest.raises(UndeclaredField, match=field):
        key_of({name: value for name, value in BASE.items() if name != field})


@given(value=values, field=st.sampled_from(sorted(RESULT_FIELDS.neutral)))
def test_neutral_fields_share_an_answer(value: Any, field: str) -> None:
    assert key_of(BASE | {field: value}) == key_of(BASE)


@pytest.mark.parametrize("wrong", ["text", b"bytes", [1.0], [True], [-1], [2**32], None, 5])
def test_tokens_must_be_ids(wrong: Any) -> None:
    with pytest.raises(TypeError, match="token ids"):
        key_of(BASE | {"tokens": wrong})


def test_no_field_is_declared_twice() -> None:
    declared = RESULT_FIELDS
    assert not declared.required & declared.joins
    assert not declared.neutral & (declared.required | declared.joins)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"temperature": 1.0}, False),
        ({"temperature": None}, False),
        ({"temperature": False}, False),
        ({"temperature": 0}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.7, "seed": 0}, True),
        ({"seed": 5}, True),
        ({"seed": None}, False),
    ],
)
def test_only_greedy_or_seeded_requests_are_deterministic(fields: dict[str, Any], expected: bool) -> None:
    assert deterministic(fields) is expected


def test_who_has_not_the_salt_can_not_make_the_key() -> None:
    assert key_of(BASE, b"t" * 32).key != key_of(BASE).key
    assert SALT not in key_of(BASE).material
