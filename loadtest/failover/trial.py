"""One trial: streams run, a decode worker is killed or stopped, and each of its streams goes on elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loadtest.client import Observation, ask
from loadtest.proxied import tell
from loadtest.stack import Stack
from pdbus.bus.presence import Fleet
from pdbus.context import Deadline
from pdbus.messages.presence import Card

ANSWER_S = 500.0
"""So long also where others use the machine too."""
_BACK_S = 120.0
_LOOK_S = 0.01


@dataclass(frozen=True)
class Way:
    """To be lost; both get the worker's id, and its process's."""

    hit: Callable[[str, int], None]
    undo: Callable[[str, int], None] = lambda id, pid: None
    dies: bool = False
    """Its supervisor starts another."""


KILL = Way(lambda id, pid: os.kill(pid, signal.SIGKILL), dies=True)
STOP = Way(lambda id, pid: os.kill(pid, signal.SIGSTOP), lambda id, pid: os.kill(pid, signal.SIGCONT))


def cut_by(proxy: subprocess.Popen[str]) -> Way:
    """Nothing comes through any more, in either direction, and nobody is told (loadtest/chaos/proxy.py)."""
    return Way(lambda id, pid: tell(proxy, f"cut {id}"), lambda id, pid: tell(proxy, f"mend {id}"))


@dataclass(frozen=True)
class Trial:
    """What one trial showed."""

    worker: str
    hit_ns: int = 0
    """When it was lost, by the wall clock,"""
    end_ns: int = 0
    """and when the last answer was whole."""
    next_token_s: tuple[float, ...] = ()
    """Of each stream that the worker was writing: how long it had no token, from the signal on."""
    others_s: tuple[float, ...] = ()
    """Of the streams of other workers."""
    failed: int = 0
    """Streams that broke, or ended without all tokens."""
    answers: tuple[Observation, ...] = field(default=(), repr=False)


async def trial(
    http: aiohttp.ClientSession,
    stack: Stack,
    fleet: Fleet,
    bodies: Sequence[dict[str, Any]],
    how: Way,
    after_tokens: int,
) -> Trial:
    """The decode worker with the most answers is lost once every stream has shown `after_tokens` tokens.

    Returns when all streams have ended, and the worker is back with nothing to do."""
    start = time.perf_counter()
    seen = [Observation(0.0) for _ in bodies]
    asked = [
        asyncio.create_task(ask(http, stack.url, body, 0.0, start, ANSWER_S, one))
        for body, one in zip(bodies, seen, strict=True)
    ]
    while not all(task.done() for task in asked) and (  # noqa: ASYNC110
        any(len(one.chunks_s) < after_tokens and not task.done() for one, task in zip(seen, asked, strict=True))
        or not any(card.load.running for card in fleet.live("decode"))  # who writes them its next card tells
    ):
        await asyncio.sleep(_LOOK_S)
    victim = busiest(fleet)
    pid, sent_s, hit_ns = stack.pids()[victim.id], time.perf_counter() - start, time.time_ns()
    how.hit(victim.id, pid)
    try:
        answers = await asyncio.gather(*asked)
    finally:
        how.undo(victim.id, pid)
    end_ns = time.time_ns()
    await idle(fleet, victim if how.dies else None)
    waits = sorted((_pause(answer, sent_s) for answer in answers), reverse=True)
    wanted = [body["max_tokens"] for body in bodies]
    failed = sum(not one.ok or one.output_tokens != most for one, most in zip(answers, wanted, strict=True))
    hit = victim.load.running
    return Trial(victim.id, hit_ns, end_ns, tuple(waits[:hit]), tuple(waits[hit:]), failed, tuple(answers))


def busiest(fleet: Fleet) -> Card:
    """The decode worker with the most answers, as its last card told."""
    workers = [card for card in fleet.cards() if card.service == "decode"]
    return max(workers, key=lambda card: (fleet.state(card.id) == "live", card.load.running))


async def idle(fleet: Fleet, dead: Card | None = None) -> None:
    """Until no decode worker has anything to do, and the dead one is replaced."""

    def holds(fleet: Fleet) -> bool:
        cards = [card for card in fleet.live("decode") if card.state == "ready"]
        back = dead is None or any(card.id == dead.id and card.incarnation != dead.incarnation for card in cards)
        return back and bool(cards) and not any(_held(card) for card in cards)

    await fleet.wait_for(holds, Deadline.after(_BACK_S))


def _held(card: Card) -> int:
    return card.load.running + card.load.waiting + card.load.leases + card.load.pages_used


def _pause(answer: Observation, sent_s: float) -> float:
    """The longest time without a token from the signal on. Tokens that were under way then may come after it."""
    later = [sent_s, *(at for at in answer.chunks_s if at > sent_s)]
    return max((after - before for before, after in itertools.pairwise(later)), default=0.0)


def percentile(values: Sequence[float], share: float) -> float:
    """Of these, or 0 where there are none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
