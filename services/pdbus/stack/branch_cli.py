"""`pdbus weights branch`: staging branches, from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdbus.stack.settings import StackSettings

if TYPE_CHECKING:
    from pdbus.stack.attach import Target

TargetOf = Callable[[argparse.Namespace, StackSettings], "Target"]


def add_branch(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser], target: TargetOf
) -> list[argparse.ArgumentParser]:
    """Adds the commands; returns their parsers."""
    what = kinds.add_parser("branch", help="staging branches: many writers, no locks")
    commands = what.add_subparsers(required=True, metavar="WHAT")

    # What they need is imported when they run: `pdbus health` must not pay for it.

    def run_list(given: argparse.Namespace, settings: StackSettings) -> int:
        from pdbus.stack.branches import show_branches

        return show_branches(target(given, settings))

    def run_seal(given: argparse.Namespace, settings: StackSettings) -> int:
        from pdbus.stack.branches import seal

        return seal(target(given, settings), given.branch, given.ref, given.message)

    def run_drop(given: argparse.Namespace, settings: StackSettings) -> int:
        from pdbus.stack.branches import drop

        return drop(target(given, settings), given.branch)

    listing = commands.add_parser("list", help="branches, and how much of each is not sealed")
    listing.set_defaults(command=run_list)
    seal = commands.add_parser("seal", help="make a version of what was pushed so far")
    seal.set_defaults(command=run_seal)
    seal.add_argument("branch", metavar="BRANCH")
    seal.add_argument("--ref", default="stable", help="the line that it continues (default: %(default)s)")
    seal.add_argument("-m", "--message", default="", help="what is new")
    drop = commands.add_parser("drop", help="throw away what is not sealed")
    drop.set_defaults(command=run_drop)
    drop.add_argument("branch", metavar="BRANCH")
    return [listing, seal, drop]
