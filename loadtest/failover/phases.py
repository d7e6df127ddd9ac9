"""Where the time went until the next token of an answer whose worker was lost: told by what all processes recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loadtest.checker.records import Event


@dataclass(frozen=True)
class Phases:
    """Of one answer."""

    noticed_s: float
    """From the loss until another worker had taken the answer."""
    read_s: float
    """From then until the router had its next token: what it had come to was read again, from a snapshot or anew."""


def phases(events: Iterable[Event], hit_ns: int, until_ns: int) -> list[Phases]:
    """Of the answers that changed their worker between these moments. `events`: in the order of time."""
    taken: dict[str, int] = {}
    found: dict[str, Phases] = {}
    for event in events:
        if not hit_ns <= event.time_ns < until_ns or event.fields.get("attempt", 1) == 1:
            continue
        session = event.fields["session"]
        if event.kind == "pin":
            taken.setdefault(session, event.time_ns)
        elif event.kind == "token" and session in taken and session not in found:
            at_ns = taken[session]
            found[session] = Phases((at_ns - hit_ns) / 1e9, (event.time_ns - at_ns) / 1e9)
    return list(found.values())
