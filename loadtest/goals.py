"""Reports by goal: what was to be shown, what was measured, and whether that is enough."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop

from loadtest.markdown import markdown
from loadtest.measurement import report

_SAID = {True: "yes", False: "no", None: "-"}


@dataclass(frozen=True, slots=True)
class Row:
    """One line. `reached` None: there is no goal, it stands beside another line."""

    what: str
    goal: str
    measured: str
    reached: bool | None
    how: str
    figures: dict[str, Any] = field(default_factory=dict)
    """What `measured` is made of, for the JSON file."""


def at_most(what: str, value: float, goal: float, unit: str, how: str, **figures: Any) -> Row:
    """NaN, nothing measured, is not at most anything."""
    return Row(what, f"≤ {goal:g} {unit}", f"{value:.3g} {unit}", value <= goal, how, {"value": value, **figures})


def at_least(what: str, value: float, goal: float, how: str, **figures: Any) -> Row:
    """Of shares, 0 to 1."""
    return Row(what, f"≥ {goal:.0%}", f"{value:.1%}", value >= goal, how, {"value": value, **figures})


def none_of(what: str, count: int, of: int, how: str, **figures: Any) -> Row:
    """Of things that must not happen. Nothing tried is nothing shown."""
    return Row(what, "0", f"{count} of {of}", of > 0 and not count, how, {"count": count, "of": of, **figures})


def beside(what: str, measured: str, how: str, **figures: Any) -> Row:
    """A figure without a goal."""
    return Row(what, "", measured, None, how, figures)


def table(sections: dict[str, Sequence[Row]]) -> str:
    lines = [
        [f"{name}: {row.what}", row.goal, row.measured, _SAID[row.reached], row.how]
        for name, rows in sections.items()
        for row in rows
    ]
    return markdown(["what", "goal", "measured", "reached", "how"], lines)


def missed(sections: dict[str, Sequence[Row]]) -> list[str]:
    """The lines whose goals are not reached."""
    return [f"{name}: {row.what}" for name, rows in sections.items() for row in rows if row.reached is False]


def concluded(given: argparse.Namespace, measuring: Coroutine[None, None, dict[str, Sequence[Row]]]) -> int:
    """Runs the measurement of a command, and tells what it found; returns the exit code: 1 where a goal is missed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measuring)
    rows = {name: [asdict(row) for row in own] for name, own in found.items()}
    report(given, table(found), {"sections": rows})
    for line in missed(found):
        print(f"not reached: {line}")
    return 1 if missed(found) else 0
