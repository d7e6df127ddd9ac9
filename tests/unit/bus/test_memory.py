"""The twin's subject matching, by NATS's rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.bus.memory import matches

TOKENS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("a.*.c", "a.b.c", True),
    ],
)
def test_wildcards(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


@given(TOKENS, st.data())
def test_a_subject_matches_itself_with_any_token_starred(tokens: list[str], data: st.DataObject) -> None:
    starred = [data.draw(st.sampled_from([token, "*"])) for token in tokens]
    subject = ".".join(tokens)
    assert matches(".".join(starred), subject)
    assert not matches(".".join([*starred, "*"]), subject)
    assert matches(".".join([*starred[:-1], ">"]), subject)
