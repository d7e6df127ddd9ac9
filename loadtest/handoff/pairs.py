"""The same cold prompts, disaggregated and colocated in turn: both stacks run all the time, one of them has work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from loadtest.asking import one
from loadtest.client import session
from loadtest.handoff.summary import Moments, moments
from loadtest.prompts import Prompts
from loadtest.stack import APART, Refused, stack

MODES: dict[str, tuple[str, ...]] = {"disaggregated": APART, "colocated": ("--colocated",)}
NEW_TOKENS = 24


async def ask_in_turn(
    prompts: Prompts, labels: Sequence[str], tokens: int, options: Sequence[str], refused: dict[str, str]
) -> dict[str, list[Moments]]:
    """Mode -> what was seen of each prompt, in the order of `labels`; each time another mode goes first.

    A mode whose stack doesn't start is left out, and `refused` says why; one that it names already is not tried."""
    async with AsyncExitStack() as held:
        http = await held.enter_async_context(session())
        running = {}
        for mode in [mode for mode in MODES if mode not in refused]:
            try:
                running[mode] = await held.enter_async_context(stack(*options, *MODES[mode]))
            except Refused as error:
                refused[mode] = str(error)
                print(f"{mode}: refused: {error}", file=sys.stderr, flush=True)
        seen: dict[str, list[Moments]] = {mode: [] for mode in running}
        for each in running.values():
            await one(http, each, prompts.draw(f"warm-up of {labels[0]}", tokens), NEW_TOKENS)
        for number, label in enumerate(labels):
            for mode in sorted(running, reverse=bool(number % 2)):
                answer = await one(http, running[mode], prompts.draw(label, tokens), NEW_TOKENS)
                seen[mode].append(moments(answer))
    return seen
