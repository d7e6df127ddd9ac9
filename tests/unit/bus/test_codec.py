"""What the codec refuses to send; what it reads is in the contract tests."""

from __future__ import annotations

from typing import Any

import pytest

from pdbus.bus.codec import decode, encode
from pdbus.errors import InvalidRequest
from pdbus.messages.router import InferRequest


def nested(depth: int) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for _ in range(depth):
        body = {"a": body}
    return body


@pytest.mark.parametrize("body", [{"seed": 1 << 64}, {"seed": -(1 << 63) - 1}, {"prompt": "\ud800"}, nested(100_000)])
def test_what_the_wire_can_t_carry_is_the_caller_s_error(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="can't be sent"):
        encode(InferRequest("completions", body))


def test_a_body_keeps_its_types() -> None:
    body = {"i": 1, "f": 1.0, "b": True, "n": None, "s": "ä", "l": [1, "x", {"y": []}], "big": 1 << 63}
    read = decode(InferRequest, encode(InferRequest("completions", body)))
    assert read.body == body
    assert [type(read.body[key]) for key in "ifb"] == [int, float, bool]
