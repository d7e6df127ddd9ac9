"""A step with answers in it stays near its time, whatever a token costs; prompts always get on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.engine.pace import INTERRUPTED_S, STEP_S, Pace

PAGE, CHUNK = 16, 512


def test_alone_a_prompt_takes_whole_chunks_and_unknown_is_a_page() -> None:
    pace = Pace(PAGE, CHUNK)
    assert (pace.prompt_tokens(0), pace.prompt_tokens(3)) == (CHUNK, PAGE)


def test_what_was_learned_without_answers_holds_beside_them() -> None:
    pace = Pace(PAGE, CHUNK)
    pace.took(0, 512, 0.512)
    pace.took(4, 0, 0.010)
    assert 32 <= pace.prompt_tokens(4) <= 40


@given(
    answers_s=st.floats(0.001, 0.03),
    token_s=st.floats(1e-5, 1e-2),
    first=st.floats(1e-5, 1e-1),
)
@settings(max_examples=200)
def test_steps_come_near_their_time_soon_also_where_all_that_was_believed_is_wrong(
    answers_s: float, token_s: float, first: float
) -> None:
    pace = Pace(PAGE, CHUNK)
    pace.took(0, CHUNK, first * CHUNK)
    taken_s = 0.0
    for _ in range(120):
        tokens = pace.prompt_tokens(8)
        assert PAGE <= tokens <= CHUNK
        taken_s = answers_s + token_s * tokens
        pace.took(8, tokens, taken_s)
    most = max(STEP_S, answers_s + token_s * PAGE)
    assert taken_s <= most * 1.1
    if PAGE < pace.prompt_tokens(8) < CHUNK:
        assert taken_s == pytest.approx(STEP_S, rel=0.1)


def test_it_follows_a_machine_that_gets_slower_and_faster() -> None:
    pace = Pace(PAGE, CHUNK)
    pace.took(1, 0, 0.01)
    limits = []
    for token_s in (1e-4, 1e-3, 1e-4):
        for _ in range(30):
            tokens = pace.prompt_tokens(1)
            pace.took(1, tokens, 0.01 + token_s * tokens)
        limits.append(pace.prompt_tokens(1))
    assert limits[0] > 300
    assert 30 < limits[1] < 50
    assert limits[2] > 300


def test_a_step_without_a_measurable_time_breaks_nothing() -> None:
    pace = Pace(PAGE, CHUNK)
    pace.took(0, 5, 0.0)
    assert pace.prompt_tokens(1) == CHUNK


def test_interrupted_answers_get_more_of_a_step_than_prompts_and_a_page_at_least() -> None:
    pace = Pace(PAGE, CHUNK)
    assert (pace.interrupted_tokens(0), pace.interrupted_tokens(3)) == (CHUNK, PAGE)
    pace.took(0, CHUNK, CHUNK * 0.002)
    pace.took(4, 0, 0.2)
    assert pace.prompt_tokens(4) == PAGE
    assert pace.interrupted_tokens(4) == int(INTERRUPTED_S / 0.002)
