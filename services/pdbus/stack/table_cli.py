"""`pdbus weights table`: sparse tables, from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdbus.stack.settings import StackSettings

if TYPE_CHECKING:
    from pdbus.stack.attach import Target

TargetOf = Callable[[argparse.Namespace, StackSettings], "Target"]


def add_table(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser], target: TargetOf
) -> list[argparse.ArgumentParser]:
    """Adds the commands; returns their parsers."""
    what = kinds.add_parser("table", help="sparse tables: rows that are updated without a commit")
    commands = what.add_subparsers(required=True, metavar="WHAT")

    # What they need is imported when they run: `pdbus health` must not pay for it.

    def run_list(given: argparse.Namespace, settings: StackSettings) -> int:
        from pdbus.stack.tables import show_tables

        return show_tables(target(given, settings))

    def run_drop(given: argparse.Namespace, settings: StackSettings) -> int:
        from pdbus.stack.tables import drop

        return drop(target(given, settings), given.table, given.message)

    listing = commands.add_parser("list", help="those of the newest version")
    listing.set_defaults(command=run_list)
    drop = commands.add_parser("drop", help="make a version without it; again, 20 minutes later: free its log")
    drop.set_defaults(command=run_drop)
    drop.add_argument("table", metavar="TABLE")
    drop.add_argument("-m", "--message", default="", help="why")
    return [listing, drop]
