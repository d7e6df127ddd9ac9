"""Answers that had to give their pages up go on where they were, with the same text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from pdbus.errors import Overloaded
from pdbus.kv.format import KvDtype
from pdbus.messages.common import Ticket
from pdbus.model.backend import Model
from pdbus.model.backends import EngineName
from tests.support.asking import ids, until
from tests.support.llama import Runner
from tests.support.workers import LocalSource, NewBus, Rig, paused, rig

PROMPTS = [random.Random(seed).choices(range(3, 320), k=30) for seed in range(4)]


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
async def test_preempted_equals_not_preempted(
    twin: NewBus, source: LocalSource, model: Model, unique: Callable[[str], str], kv_dtype: KvDtype, engine: EngineName
) -> None:
    async with rig(
        twin, source, name=unique("tiny"), decode_pages=12, swap_pages=40, kv_dtype=kv_dtype, engine=engine
    ) as workers:  # four prompts take 8 pages, and their answers 16 in the end
        router, core = workers.router, workers.decode.core
        saved: list[int] = []
        save = core._scheduler._preemption._swap.save  # type: ignore[union-attr]
        core._scheduler._preemption._swap.save = lambda one: saved.append(one.computed) or save(one)  # type: ignore
        answers = await _side_by_side(workers, [router.ticket(prompt, 34) for prompt in PROMPTS])
        assert saved
        assert answers == [Runner(model, kv_dtype=kv_dtype).greedy(prompt, 34) for prompt in PROMPTS]
        await workers.until_idle()
        file = core._scheduler._preemption._swap._file  # type: ignore[union-attr]
        assert file.free_slots == file.slots


async def test_a_preempted_answer_that_is_cancelled_is_let_go(
    twin: NewBus, source: LocalSource, unique: Callable[[str], str]
) -> None:
    async with rig(twin, source, name=unique("tiny"), decode_pages=6, swap_pages=40) as workers:
        router, core = workers.router, workers.decode.core
        tickets = [router.ticket(prompt, 400) for prompt in PROMPTS[:2]]
        lease = core.pages.hold()  # so that neither can finish
        await core.call(lambda: lease.allocate(1))
        with paused(workers.decode):
            for ticket in tickets:
                await router.run_local(ticket)
            await until(lambda: core.live == len(tickets))
        await until(lambda: core.preempted)
        for ticket in tickets:
            await router.cancel(ticket)
            await router.cancelled_by(ticket, {router.decode})
        await core.call(lease.release)
        await workers.until_idle()


async def test_without_swap_an_answer_that_can_t_grow_is_given_up(
    twin: NewBus, source: LocalSource, unique: Callable[[str], str]
) -> None:
    async with rig(twin, source, name=unique("tiny"), decode_pages=6) as workers:
        outcomes = await _side_by_side(workers, [workers.router.ticket(prompt, 60) for prompt in PROMPTS[:2]])
        assert sum(isinstance(outcome, Overloaded) for outcome in outcomes) >= 1
        await workers.until_idle()


async def _side_by_side(workers: Rig, tickets: list[Ticket]) -> list[list[int] | BaseException]:
    """Their answers, or what each ended with; all are there when the decode worker takes its next turn."""
    with paused(workers.decode):
        answers = [asyncio.create_task(workers.router.answer_local(ticket)) for ticket in tickets]
        await until(lambda: workers.decode.core.live == len(tickets))
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    return [outcome if isinstance(outcome, BaseException) else ids(outcome) for outcome in outcomes]
