"""The engine's thread: a failing pass costs its own sequences, cancel leaves a pass in its middle, death is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from pdbus.engine.arriving import Arriving
from pdbus.engine.core import Core
from pdbus.engine.scheduler import Limits
from pdbus.engine.sequence import Ended, Event, LayerReady, Produced, Sequence
from pdbus.errors import Cancelled, Corrupt, PdbusError, Unavailable
from pdbus.kv.format import PageFormat
from pdbus.kv.pool import KvPool
from pdbus.model.batch import Batch
from tests.support.asking import until
from tests.support.sequences import sequence


class Model:
    """Always the same next token. `on_pass` is called in each pass, between its two layers."""

    def __init__(self, token: int = 9, on_pass: Callable[[], None] = lambda: None) -> None:
        self.logits = np.zeros(20, np.float32)
        self.logits[token] = 1.0
        self.on_pass = on_pass

    @property
    def kind(self) -> int:
        return id(self)

    def forward(self, batch: Batch, pool: Any, on_layer: Callable[[int], None] | None, beside: Any = ()) -> np.ndarray:
        assert not beside
        told = on_layer or (lambda layer: None)
        told(0)
        self.on_pass()
        told(1)
        return np.tile(self.logits, (len(batch.logit_rows), 1))


class Heard:
    """All events, and a way to wait for the end of a sequence."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.failures: list[BaseException] = []
        self.news = asyncio.Event()

    def __call__(self, events: list[Event]) -> None:
        self.events += events
        self.news.set()

    async def end_of(self, one: Sequence) -> Ended:
        async with asyncio.timeout(30):
            while True:
                for event in self.events:
                    if isinstance(event, Ended) and event.sequence is one:
                        return event
                self.news.clear()
                await self.news.wait()

    def ids(self, one: Sequence) -> list[int]:
        return [token for e in self.events if isinstance(e, Produced) and e.sequence is one for token in e.ids]


@asynccontextmanager
async def engine(pages: int = 40) -> AsyncIterator[tuple[Core, Heard]]:
    heard = Heard()
    pool = KvPool(PageFormat(layers=2, kv_heads=1, head_dim=2, page_tokens=4), pages)
    async with Core(pool, Limits(4, 8, 8), heard, heard.failures.append) as core:
        yield core, heard


async def test_an_answer_is_told_token_by_token_and_its_pages_come_back() -> None:
    async with engine() as (core, heard):
        one = sequence(core.pages, [1] * 10, 5, model=Model())
        core.submit(one)
        assert (await heard.end_of(one)).error is None
        assert heard.ids(one) == [9] * 5
        assert core.pages.used == 0
        assert core.progress.count > 0


async def test_with_a_hand_over_each_layer_is_told_and_pages_stay_until_they_are_discarded() -> None:
    async with engine() as (core, heard):
        one = sequence(core.pages, [1] * 10, 5, model=Model(), handoff=True)
        core.submit(one)
        await heard.end_of(one)
        layers = [(e.layer, e.start, e.tokens) for e in heard.events if isinstance(e, LayerReady)]
        assert layers == [(0, 0, 8), (1, 0, 8), (0, 8, 2), (1, 8, 2)]
        assert (heard.ids(one), core.pages.used) == ([9], 3)
        await core.discard(one)
        await core.discard(one)
        assert core.pages.used == 0


async def test_a_pass_that_fails_costs_its_own_sequences_only() -> None:
    def fail() -> None:
        raise RuntimeError("a kernel failed")

    async with engine() as (core, heard):
        bad = sequence(core.pages, [1] * 4, model=Model(on_pass=fail), root=b"bad")
        good = sequence(core.pages, [1] * 4, 3, model=Model(), root=b"good")
        core.submit(bad)
        core.submit(good)
        error = (await heard.end_of(bad)).error
        assert type(error) is PdbusError
        assert "kernel" not in error.message  # what others are told holds no foreign text
        await heard.end_of(good)
        assert heard.ids(good) == [9] * 3
        assert (core.pages.used, heard.failures) == (0, [])


async def test_logits_that_are_no_numbers_fail_their_sequence() -> None:
    async with engine() as (core, heard):
        model = Model()
        model.logits[3] = float("nan")
        one = sequence(core.pages, [1] * 4, model=model)
        core.submit(one)
        assert isinstance((await heard.end_of(one)).error, Corrupt)
        assert core.pages.used == 0


async def test_a_cancel_leaves_a_pass_in_its_middle() -> None:
    entered, gate = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        gate.wait(60)

    async with engine() as (core, heard):
        one = sequence(core.pages, [1] * 8, model=Model(on_pass=wait), handoff=True)
        core.submit(one)
        await asyncio.to_thread(entered.wait, 60)
        discarding = asyncio.create_task(core.discard(one))
        await asyncio.sleep(0)
        gate.set()
        await discarding
        assert isinstance((await heard.end_of(one)).error, Cancelled)
        assert {e.layer for e in heard.events if isinstance(e, LayerReady)} == {0}
        assert core.pages.used == 0


async def test_short_prompts_in_one_pass_are_left_in_its_middle_too_where_all_are_cancelled() -> None:
    """Each has no more than a page; together they take as long as one of so many tokens."""
    cut: list[Sequence] = []
    gate = threading.Event()
    async with engine() as (core, heard):

        def cancel_all() -> None:
            for one in cut:
                core.cancel(one)

        model = Model(on_pass=cancel_all)
        cut += [sequence(core.pages, [number] * 4, model=model) for number in range(2)]
        core.post(lambda: gate.wait(60))  # so that one turn has both
        for one in cut:
            core.submit(one)
        gate.set()
        assert all([isinstance((await heard.end_of(one)).error, Cancelled) for one in cut])
        assert [heard.ids(one) for one in cut] == [[], []]


async def test_pages_that_are_being_filled_stay_until_they_are_discarded() -> None:
    """Whoever fills them may still write: nobody else gets them before."""
    async with engine() as (core, heard):
        one = sequence(core.pages, [1] * 8, model=Model(), ready=False)
        core.submit(one)
        await until(lambda: core.pages.used)
        core.cancel(one)
        assert isinstance((await heard.end_of(one)).error, Cancelled)
        assert core.pages.used == 2
        core.resume(one, 4)  # a filler that has not heard of it
        await core.discard(one)
        assert core.pages.used == 0


async def test_an_engine_that_dies_says_so_and_gives_everything_back() -> None:
    def die() -> None:
        raise SystemError("broken")

    async with engine() as (core, heard):
        one = sequence(core.pages, [1] * 8, model=Model(), ready=False)
        core.submit(one)
        await until(lambda: core.pages.used)
        core.post(die)
        await until(lambda: heard.failures)
        assert "broken" in str(heard.failures[0])
        await core.discard(one)
        assert core.pages.used == 0
        with pytest.raises(Unavailable):
            core.submit(one)


async def test_work_given_at_the_end_is_done() -> None:
    async with engine() as (core, _):
        hold = core.pages.hold()
        await core.call(lambda: hold.allocate(3))
        gate = threading.Event()
        core.post(gate.wait)
        releasing = asyncio.create_task(core.call(hold.release))
        await asyncio.sleep(0)
        gate.set()
    await releasing
    assert core.pages.used == 0


@pytest.mark.parametrize("dies", [False, True])
async def test_a_thread_that_has_ended_is_not_taken_for_one_that_hangs(dies: bool) -> None:
    """What is closed after it may take its time."""

    def die() -> None:
        raise SystemError("broken")

    async with engine() as (core, heard):
        if dies:
            core.post(die)
            await until(lambda: heard.failures)
    assert core.progress.waits


async def test_what_a_call_raises_is_the_callers() -> None:
    async with engine(pages=2) as (core, heard):
        hold = core.pages.hold()
        with pytest.raises(PdbusError):
            await core.call(lambda: hold.allocate(3))
        assert await core.call(lambda: 5) == 5
        assert heard.failures == []


async def arriving_in(core: Core, prompt: list[int], present: int, arriving: Arriving, model: Model) -> Sequence:
    """A sequence of which all pages but the last come from elsewhere; `present` tokens are there."""
    one = sequence(core.pages, prompt, 5, model=model, handoff=True, ready=False)
    core.submit(one)
    await until(lambda: one.hold.pages)
    one.computed = present
    core.resume_early(one, len(prompt) // 4 * 4, arriving)
    return one


async def test_the_rest_is_computed_while_cached_layers_come_and_told_once_it_is_done() -> None:
    reached = threading.Event()
    arriving = Arriving(10.0)
    arriving.arrived(1)
    async with engine() as (core, heard):
        one = await arriving_in(core, [1] * 10, 0, arriving, Model(on_pass=reached.set))
        assert await asyncio.to_thread(reached.wait, 60)
        await asyncio.sleep(0)
        assert not any(isinstance(event, LayerReady | Produced) for event in heard.events)
        arriving.arrived(2)
        await heard.end_of(one)
        core.resume(one, 8)
        layers = [(e.layer, e.start, e.tokens) for e in heard.events if isinstance(e, LayerReady)]
        assert (layers, heard.ids(one)) == ([(0, 8, 2), (1, 8, 2)], [9])
        await core.discard(one)
        assert core.pages.used == 0


@pytest.mark.parametrize("late", [False, True])
async def test_what_does_not_come_is_computed(late: bool) -> None:
    """Given up by its reader, or not there within the time that the engine has for it."""
    arriving = Arriving(0.01 if late else 10.0)
    arriving.arrived(1)
    async with engine() as (core, heard):
        one = await arriving_in(core, [1] * 10, 4, arriving, Model())
        if late:
            await until(lambda: one.arriving is None and one.computed == 4)
        arriving.fail()
        core.resume(one, 4)
        await heard.end_of(one)
        layers = [(e.layer, e.start, e.tokens) for e in heard.events if isinstance(e, LayerReady)]
        assert (layers, heard.ids(one)) == ([(0, 4, 6), (1, 4, 6)], [9])
        await core.discard(one)


async def test_one_that_waits_for_a_layer_can_be_cancelled() -> None:
    arriving = Arriving(10.0)
    async with engine() as (core, heard):
        one = await arriving_in(core, [1] * 10, 0, arriving, Model())
        await until(lambda: core.busy or one.arriving)
        core.cancel(one)
        arriving.fail()
        assert isinstance((await heard.end_of(one)).error, Cancelled)
        assert core.pages.used == 3  # its reader may still be at work
        await core.discard(one)
        assert core.pages.used == 0
