"""What goes wrong thousands of times a second fills no log."""

from __future__ import annotations

import pytest

from pdbus.bus.instruments import Instruments, Seldom


def test_it_is_told_once_a_second_with_how_often_it_was(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    tell = Seldom(lambda: now_s)
    for _ in range(1000):
        tell("dropped", "pd.v1.tokens.r", "no connection")
    now_s += 1.0
    tell("dropped", "pd.v1.cancel", "no connection")
    assert [record.getMessage() for record in caplog.records] == [
        "dropped (1 times), the last on pd.v1.tokens.r: no connection",
        "dropped (1000 times), the last on pd.v1.cancel: no connection",
    ]


def test_all_of_it_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    instruments = Instruments()
    for _ in range(50):
        instruments.dropped("a", "no connection")
        instruments.malformed("a", "garbage")
    assert (instruments.dropped_count, instruments.malformed_count) == (50, 50)
    assert len(caplog.records) == 2
