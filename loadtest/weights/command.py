"""Arguments, the sections in turn, and their report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from loadtest.goals import Row, concluded, table
from loadtest.measurement import parsed, parser
from loadtest.weights.sections import SECTIONS
from loadtest.weights.terms import Terms


def arguments(argv: list[str]) -> argparse.Namespace:
    made = parser("weights", "What changing weights costs while the system serves, and that it goes right.", 1)
    known = "\n".join(f"  {name:10} {section.about}" for name, section in SECTIONS.items())
    made.epilog, made.formatter_class = f"sections:\n{known}", argparse.RawDescriptionHelpFormatter
    made.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION")
    made.add_argument("--short", action="store_true", help="a look, in a minute or less each, instead of a figure")
    made.add_argument("--verify", type=int, default=6, help="versions whose answers are computed again (default: 6)")
    return parsed(made, argv)


def main(argv: list[str]) -> int:
    given = arguments(argv)
    return concluded(given, measure(given))


async def measure(given: argparse.Namespace) -> dict[str, Sequence[Row]]:
    """By section, in the order asked for, each on stacks of its own."""
    terms = Terms(given.model, tuple(given.up), given.short, given.verify)
    found: dict[str, Sequence[Row]] = {}
    for name in given.only:
        found[name] = await SECTIONS[name].measure(terms)
        print(table({name: found[name]}), file=sys.stderr, flush=True)
    return found
