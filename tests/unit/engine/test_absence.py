"""A needed peer counts as missing after a while without a sign of life, and not before."""

from __future__ import annotations

from pdbus.engine.absence import Absence


def test_a_peer_is_missing_after_its_time_and_back_at_once() -> None:
    absence, live = Absence(2.0), {"a"}
    look = lambda now_s: absence.missing(["a", "b"], live.__contains__, now_s)  # noqa: E731
    assert look(0.0) == []
    assert look(1.9) == []
    assert look(2.0) == ["b"]
    live.add("b")
    assert look(2.1) == []
    live.clear()
    assert look(2.2) == []
    assert sorted(look(4.2)) == ["a", "b"]


def test_a_peer_that_is_not_needed_meanwhile_starts_anew() -> None:
    absence = Absence(1.0)
    absence.missing(["a"], lambda _: False, 0.0)
    absence.missing([], lambda _: False, 0.5)
    assert absence.missing(["a"], lambda _: False, 1.0) == []
