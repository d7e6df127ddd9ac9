"""How long a stream is without a token where its worker is lost, in simulated seconds: noticing it, no computing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from loadtest.simulated import SimulatedWorker
from loadtest.simulated_answers import letters
from loadtest.simulated_peers import Peers
from pdbus.bus.fleet_table import SUSPECT_AFTER_S
from pdbus.bus.presence import INTERVAL_S, TICK_S
from pdbus.context import Deadline, RequestContext
from pdbus.router.cache_control import CacheControl
from pdbus.router.frontend import Caller
from pdbus.router.openai_schema import parse_builtins
from pdbus.router.questions import PATIENCE_S, QUIET_S
from tests.support.router_rig import MODEL, Rig, rig, until
from tests.support.simulated_time import simulated

STEP_S, TOKENS = 0.04, 24
LOOK_S = 0.1
"""So often a router looks after its streams."""
SOON_S = 2 * STEP_S + LOOK_S
"""For the next worker to begin, after whoever was lost is given up."""
Loss = Callable[[Rig, SimulatedWorker], Awaitable[object]]


async def dies(r: Rig, worker: SimulatedWorker) -> None:
    await worker.die()


async def hangs(r: Rig, worker: SimulatedWorker) -> None:
    await worker.hang()


async def starts_again(r: Rig, worker: SimulatedWorker) -> None:
    await worker.die()
    await r.start_again(worker)


async def longest_wait(r: Rig, lose: Callable[[float], Awaitable[None]] | None = None) -> float:
    """Without a token, of one request. `lose`: is called from the first one on, with the seconds since the asking."""
    begun = time.monotonic()
    body = {"model": MODEL, "prompt": "Some words", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    caller = Caller(RequestContext(Deadline.after(60.0)), CacheControl(read=False, store=False))
    moments, ids = [begun], list[int]()
    async with r.router.frontend.answer(parse_builtins("completions", body), caller) as answer:
        async for batch in answer.batches():
            moments.append(time.monotonic())
            ids += [id for delta in batch for id in delta.ids]
            if lose:
                await lose(moments[-1] - begun)
    ticket = next(ticket for worker in r.workers for ticket in worker.tickets)
    assert ids == list(letters(replace(ticket, delivered=())))
    return max(later - earlier for earlier, later in pairwise(moments))


LOSSES = pytest.mark.parametrize(
    ("loss", "most_s"), [(dies, QUIET_S), (starts_again, QUIET_S), (hangs, max(SUSPECT_AFTER_S, QUIET_S + PATIENCE_S))]
)


@LOSSES
def test_a_worker_is_lost_while_it_writes(loss: Loss, most_s: float) -> None:
    """One that is dead is found out by the first question, one that hangs once it is silent in every way."""

    async def wait() -> float:
        async with rig(decodes=2, local_tokens=1 << 30, step_s=STEP_S) as r:
            lost: list[SimulatedWorker] = []

            async def lose(since_s: float) -> None:
                if since_s > 10 * STEP_S and not lost:
                    lost.append(next(worker for worker in r.decodes if worker.held))
                    await loss(r, lost[0])

            waited = await longest_wait(r, lose)
            assert lost
            return waited

    assert simulated(wait) <= most_s + TICK_S + SOON_S


@pytest.mark.parametrize("local_tokens", [0, 1 << 30])
@LOSSES
def test_a_worker_is_lost_before_it_accepts(loss: Loss, most_s: float, local_tokens: int) -> None:
    """The ticket was on its way: no error tells that it was not taken, and who is there now does not know it."""

    async def wait() -> float:
        async with rig(prefills=2, decodes=2, local_tokens=local_tokens, step_s=STEP_S) as r:
            readers = r.decodes if local_tokens else r.prefills
            for worker in readers:
                worker.behaviour.deaf = True
            asking = asyncio.create_task(longest_wait(r))
            await until(lambda: any(worker.behaviour.unheard for worker in readers))
            lost, other = sorted(readers, key=lambda worker: -worker.behaviour.unheard)
            other.behaviour.deaf = False
            await loss(r, lost)
            return await asking

    assert simulated(wait) <= most_s + INTERVAL_S + TICK_S + SOON_S


@LOSSES
def test_a_worker_is_lost_in_mid_hand_over(loss: Loss, most_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has sent the first token; the other one is there, and waits for the rest."""
    hand_over = Peers.hand_over
    monkeypatch.setattr(Peers, "hand_over", lambda peers, key: hand_over(peers, key) if key[1] > 1 else None)

    async def wait() -> float:
        async with rig(prefills=2, decodes=2, step_s=STEP_S) as r:
            lost: list[SimulatedWorker] = []

            async def lose(since_s: float) -> None:
                if not lost:
                    lost.append(next(worker for worker in r.prefills if worker.tickets))
                    await loss(r, lost[0])

            return await longest_wait(r, lose)

    assert simulated(wait) <= most_s + INTERVAL_S + TICK_S + SOON_S
