from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from pdbus.errors import InvalidRequest
from pdbus.messages.common import Sampling
from pdbus.model.limits import check_sampling, check_tokens

EDGES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 10**9},
    {"top_p": 1e-9},
    {"min_p": 1.0},
    {"logprobs": 0},
    {"logprobs": 20},
    {"logit_bias": ((0, -100.0), (99, 100.0))},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0},
]
WRONG: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("presence_penalty", math.nan),
    ("frequency_penalty", math.inf),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logit_bias", ((100, 1.0),)),
    ("logit_bias", ((-1, 1.0),)),
    ("logit_bias", ((1, math.nan),)),
]


@pytest.mark.parametrize("fields", EDGES, ids=str)
def test_what_is_allowed(fields: dict[str, Any]) -> None:
    check_sampling(dataclasses.replace(Sampling(), **fields), vocab_size=100)


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_what_is_refused_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(dataclasses.replace(Sampling(), **{name: value}), vocab_size=100)
    assert caught.value.param == name


@pytest.mark.parametrize("token", [-1, 100])
def test_a_foreign_token_id_is_refused(token: int) -> None:
    check_tokens([0, 99], vocab_size=100)
    with pytest.raises(InvalidRequest, match="token id"):
        check_tokens([0, token], vocab_size=100)
