"""A ticket that can't be computed is refused with the field that is wrong."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.engine.tickets import check_addressed, check_ticket
from pdbus.errors import DeadlineExceeded, InvalidRequest
from pdbus.messages.common import Sampling, Ticket


def model_of(tokens: int) -> Any:
    """A model of 100 tokens and that context."""
    return SimpleNamespace(vocab_size=100, max_positions=tokens)


CONFIG = model_of(64)
TICKET = Ticket(
    "r", 0, 1, "router", "m", bytes(32), "anonymous", b"", (1, 2), (), Sampling(), 7, 8, (), time.time_ns() + 10**12
)


def sampling(**fields: object) -> dict[str, object]:
    return {"sampling": replace(Sampling(), **fields)}  # type: ignore[arg-type]


def test_a_sound_ticket_passes() -> None:
    fresh = replace(TICKET, deadline_ns=time.time_ns() + 600 * 10**9)
    assert check_addressed(fresh, "m").remaining_s > 500
    check_ticket(TICKET, CONFIG)
    check_ticket(replace(TICKET, prompt=(1,) * 63), CONFIG)
    check_ticket(replace(TICKET, max_tokens=0, prompt_logprobs=20), CONFIG)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": ()},
        {"prompt": (1,) * 64},
        {"prompt": (1,) * 60, "delivered": (1,) * 4},
        {"prompt": (100,)},
        {"delivered": (-1,)},
        {"max_tokens": 0},
        {"max_tokens": 2, "delivered": (1, 2)},
        {"stop_ids": tuple(range(65))},
        {"seed": -1},
        {"seed": 1 << 64},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": -1},
        sampling(logit_bias=((100, 1.0),)),
        sampling(logit_bias=((1, float("nan")),)),
        sampling(temperature=-0.1),
        sampling(temperature=float("nan")),
        sampling(temperature=float("inf")),
        sampling(top_p=1.1),
        sampling(min_p=-0.1),
        sampling(top_k=-1),
        sampling(repetition_penalty=0.0),
        sampling(logprobs=21),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_ticket(replace(TICKET, **wrong), CONFIG)
    assert refusal.value.param


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "other"},
        {"attempt": 0},
        {"choice": -1},
        {"request_id": ""},
        {"router": ""},
        {"request_id": "x" * 129},
        {"root": b"x"},
    ],
    ids=str,
)
def test_a_wrong_address_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        check_addressed(replace(TICKET, **wrong), "m")


def test_a_past_deadline_is_refused() -> None:
    with pytest.raises(DeadlineExceeded):
        check_addressed(replace(TICKET, deadline_ns=time.time_ns() - 1), "m")


def test_log_probabilities_of_a_prompt_have_to_fit_into_a_message() -> None:
    long, config = replace(TICKET, prompt=(1,) * 8000, prompt_logprobs=20), model_of(10_000)
    with pytest.raises(InvalidRequest):
        check_ticket(long, config)
