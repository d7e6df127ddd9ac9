"""What `pdbus weights branch` does."""

from __future__ import annotations

import asyncio

from pdbus.client.weights import Seal
from pdbus.stack.attach import Target
from pdbus.stack.view import print_rows, wide_console
from pdbus.stack.weights import opened
from pdbus.stack.weights_log import short


def show_branches(target: Target) -> int:
    async def find() -> list[tuple[str, str, str]]:
        async with opened(target) as weights:
            states = await weights.branches()
        return [(one.name, str(one.entries), str(one.sealed.upto) if one.sealed else "never") for one in states]

    rows = asyncio.run(find())
    print_rows(rows, "branch", "entries", "sealed up to", nothing="there are no branches")
    return 0


def seal(target: Target, branch: str, ref: str, message: str) -> int:
    async def make() -> Seal:
        async with opened(target) as weights:
            return await weights.branch(branch).seal(ref=ref, message=message)

    done = asyncio.run(make())
    rebased = f", on top of {short(done.rebased[-1])} in the end" if done.rebased else ""
    void = f", {done.void} of them void" if done.void else ""
    wide_console().print(f"version {done.root.hex()} of {done.entries} entries{void}{rebased}")
    return 0


def drop(target: Target, branch: str) -> int:
    async def throw_away() -> int:
        async with opened(target) as weights:
            return await weights.branch(branch).drop()

    wide_console().print(f"{asyncio.run(throw_away())} entries of {branch} were dropped")
    return 0
