"""Where the time went until an answer's next token, told from what processes recorded."""

from __future__ import annotations

from loadtest.checker.records import Event
from loadtest.failover.phases import Phases, phases

S = 10**9


def event(at_s: float, kind: str, session: str, attempt: int) -> Event:
    return Event("process", 1, int(at_s * S), kind, {"session": session, "attempt": attempt})


def test_from_the_loss_to_the_next_worker_and_on_to_its_first_token() -> None:
    events = [
        event(1.0, "pin", "a", 1),
        event(9.9, "pin", "b", 2),  # before it was lost
        event(10.1, "token", "a", 1),  # was under way
        event(10.5, "pin", "a", 2),
        event(10.6, "pin", "a", 2),  # the other leg's
        event(11.0, "pin", "a", 3),
        event(12.5, "token", "a", 3),
        event(12.6, "token", "a", 3),
        event(30.0, "pin", "c", 2),  # of a later trial
    ]
    assert phases(events, 10 * S, 20 * S) == [Phases(0.5, 2.0)]
