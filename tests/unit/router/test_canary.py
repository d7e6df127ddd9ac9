from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdbus.router.canary import ref_of

SESSIONS = [f"session {number}".encode() for number in range(4000)]


def test_without_shares_all_are_served_by_the_default() -> None:
    assert {ref_of(session, {}, "stable") for session in SESSIONS} == {"stable"}


@given(st.floats(0.0, 1.0))
def test_a_canary_takes_about_its_share(share: float) -> None:
    taken = Counter(ref_of(session, {"canary": share}, "stable") for session in SESSIONS)["canary"]
    assert abs(taken / len(SESSIONS) - share) < 0.04


def test_all_or_nothing_is_exact() -> None:
    assert {ref_of(session, {"canary": 1.0}, "stable") for session in SESSIONS} == {"canary"}
    assert {ref_of(session, {"canary": 0.0}, "stable") for session in SESSIONS} == {"stable"}


@given(st.binary(max_size=40), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_session_that_a_canary_has_stays_with_it_as_the_share_grows(session: bytes, one: float, other: float) -> None:
    low, high = sorted((one, other))
    if ref_of(session, {"canary": low}, "stable") == "canary":
        assert ref_of(session, {"canary": high}, "stable") == "canary"
