"""The second tier gives back the same bytes, without gaps, and never stands in a request's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from pdbus.engine.arriving import Arriving, Late
from pdbus.engine.core import Core
from pdbus.engine.prefix_tier import PrefixTier
from pdbus.engine.scheduler import Limits
from pdbus.engine.sequence import Sequence
from pdbus.kv.format import PageFormat
from pdbus.kv.pool import KvPool
from tests.support.asking import until
from tests.support.ring import Ring, fleet_of
from tests.support.sequences import sequence

PROMPT = list(range(19))  # four full pages of 4 tokens, and three tokens


@asynccontextmanager
async def worker(ring: Ring, nodes: int = 1, pages: int = 20) -> AsyncIterator[tuple[Core, PrefixTier]]:
    """One prefill worker's engine, whose pool holds random numbers."""
    pool = KvPool(PageFormat(layers=2, kv_heads=1, head_dim=2, page_tokens=4), pages)
    for layer in range(2):
        torch.nn.init.normal_(pool.layer(layer))
    async with (
        Core(pool, Limits(4, 8, 8), lambda events: None, lambda error: None) as core,
        PrefixTier(ring, fleet_of(nodes), core) as tier,  # type: ignore[arg-type]
    ):
        yield core, tier


async def holding(core: Core, prompt: list[int], computed: int = 0) -> Sequence:
    """A sequence that is not ready, with its pages; the first `computed` tokens are published."""
    one = sequence(core.pages, prompt, cache=True, ready=False, handoff=True)
    core.submit(one)
    await until(lambda: one.hold.pages)
    if computed:
        one.computed = computed
        await core.call(lambda: core._scheduler.publishing.publish(one))
    return one


def ignored(filled: int, arriving: Arriving) -> None:
    """For who begins only once all is there."""


def bytes_of(core: Core, page: int) -> list[bytes]:
    return [core.pool.layer(layer)[page].numpy().tobytes() for layer in range(2)]


async def test_pages_that_one_worker_computed_fill_those_of_another() -> None:
    ring = Ring()
    async with worker(ring) as (core, tier), worker(ring) as (other_core, other_tier):
        one = await holding(core, PROMPT, computed=16)
        tier.keep(one, 0)
        await until(lambda: ring.puts == 4)
        other = await holding(other_core, PROMPT)
        assert await other_tier.fill(other, 0, ignored) == 16
        for page, other_page in zip(one.hold.pages[:4], other.hold.pages[:4], strict=True):
            assert bytes_of(core, page) == bytes_of(other_core, other_page)
        other_tier.keep(other, 16)
        tier.keep(one, 0)
        for each, ones in ((core, one), (other_core, other)):
            await each.discard(ones)
            await until(lambda each=each: not each.pages.used)
        assert ring.puts == 4  # nothing is written twice


async def test_the_last_token_is_left_to_be_computed() -> None:
    ring = Ring()
    async with worker(ring) as (core, tier):
        one = await holding(core, PROMPT, computed=16)
        tier.keep(one, 0)
        await until(lambda: ring.puts == 4)
        exact = sequence(core.pages, PROMPT[:16], cache=True)
        await core.call(lambda: exact.hold.allocate(4))
        assert await tier.fill(exact, 0, ignored) == 12


async def test_a_gap_or_a_broken_page_ends_what_is_found() -> None:
    ring = Ring()
    async with worker(ring) as (core, tier):
        one = await holding(core, PROMPT, computed=16)
        tier.keep(one, 0)
        await until(lambda: ring.puts == 4)
        other = sequence(core.pages, PROMPT, cache=True)
        await core.call(lambda: other.hold.allocate(5))
        root, material, value = ring.entries[one.keys[2].digest]
        for wrong in ((root, material, value[:-2]), (root, b"other tokens", value), (b"other root", material, value)):
            ring.entries[one.keys[2].digest] = wrong
            assert await tier.fill(other, 0, ignored) == 8
        assert await tier.fill(other, 4, ignored) == 4
        await core.call(other.hold.release)
        await core.discard(one)


async def test_without_nodes_or_room_nothing_is_kept_and_nothing_fails() -> None:
    for ring, nodes in ((Ring(), 0), (Ring(full=True), 1)):
        async with worker(ring, nodes) as (core, tier):
            one = await holding(core, PROMPT, computed=16)
            tier.keep(one, 0)
            await asyncio.sleep(0)
            await core.discard(one)
            await until(lambda core=core: not core.pages.used)
            assert ring.entries == {}
            assert await tier.fill(one, 0, ignored) == 0


async def test_reading_that_does_not_pay_is_not_done() -> None:
    ring = Ring()
    async with worker(ring) as (core, tier):
        one = await holding(core, PROMPT, computed=16)
        tier.keep(one, 0)
        await until(lambda: ring.puts == 4)
        other = sequence(core.pages, PROMPT, cache=True)
        await core.call(lambda: other.hold.allocate(5))
        for _ in range(9):
            tier.rates.computed(1000, 0.001)
            tier.rates.read(1, 1.0)
        asked = ring.gets
        assert await tier.fill(other, 0, ignored) == 0
        assert ring.gets == asked


async def test_a_long_prefix_is_read_at_once_and_up_to_a_gap() -> None:
    ring, prompt = Ring(), list(range(75))  # 18 full pages
    async with worker(ring, pages=60) as (core, tier), worker(ring, pages=60) as (other_core, other_tier):
        one = await holding(core, prompt, computed=72)
        tier.keep(one, 0)
        await until(lambda: ring.puts == 18)
        other = await holding(other_core, prompt)
        assert await other_tier.fill(other, 0, ignored) == 72
        assert ring.gets == 1
        for page, other_page in zip(one.hold.pages[:18], other.hold.pages[:18], strict=True):
            assert bytes_of(core, page) == bytes_of(other_core, other_page)
        del ring.entries[one.keys[11].digest]
        assert await other_tier.fill(other, 0, ignored) == 44


async def test_pages_that_a_sequence_has_no_more_are_not_written_to() -> None:
    ring = Ring()
    async with worker(ring) as (core, tier):
        one = await holding(core, PROMPT, computed=16)
        tier.keep(one, 0)
        await until(lambda: ring.puts == 4)
        pages = list(one.hold.pages)
        await core.discard(one)
        for page in pages:
            for layer in range(2):
                core.pool.layer(layer)[page] = 0.0
        assert await tier.fill(one, 0, ignored) == 0
        assert ring.broken == 1
        assert not any(any(part) for page in pages for part in bytes_of(core, page))


async def test_the_rest_begins_once_the_last_layers_come_as_fast_as_it_is_computed() -> None:
    ring, begun = Ring(), []
    seen: list[tuple[int, int]] = []

    async def gate(part: int) -> None:
        seen.append((part, len(begun)))

    async with worker(ring) as (core, tier):
        one = await holding(core, PROMPT, computed=16)
        tier.keep(one, 0)
        await until(lambda: ring.puts == 4)
        other = await holding(core, [*PROMPT[:18], 0])
        ring.gate = gate
        for compute_s, early in ((1e-12, 0), (1e3, 1)):
            begun.clear()
            seen.clear()
            for _ in range(15):
                tier.rates.computed(1000, 1000 * compute_s)
            assert await tier.fill(other, 0, lambda filled, arriving: begun.append((filled, arriving))) == 16
            assert [filled for filled, _ in begun] == [16]
            assert seen == [(0, 0), (1, early)]
            begun[0][1].wait(1)
        for each in (one, other):
            await core.discard(each)


async def test_who_has_begun_is_told_where_the_rest_does_not_come() -> None:
    ring, begun = Ring(), []
    async with worker(ring) as (core, tier):
        one = await holding(core, PROMPT, computed=16)
        tier.keep(one, 0)
        await until(lambda: ring.puts == 4)
        tier.rates.computed(1000, 1e6)
        ring.stops_at = 1
        assert await tier.fill(one, 0, lambda filled, arriving: begun.append(arriving)) == 0
        begun[0].wait(0)
        with pytest.raises(Late):
            begun[0].wait(1)
        await core.discard(one)


async def test_while_the_engine_computes_only_pages_in_use_by_others_are_written() -> None:
    ring = Ring()
    async with worker(ring) as (core, tier):
        one = await holding(core, PROMPT, computed=16)
        core.busy = True
        core._turn = lambda: True  # type: ignore[method-assign]
        tier.keep(one, 8)
        await until(lambda: ring.puts == 2)
        assert set(ring.entries) == {key.digest for key in one.keys[:2]}
        core._turn = lambda: False  # type: ignore[method-assign]
        await until(lambda: ring.puts == 4)


async def test_a_snapshot_is_written_while_the_engine_computes_also_of_pages_that_waited_already() -> None:
    ring = Ring()
    async with worker(ring) as (core, tier):
        one = await holding(core, PROMPT, computed=16)
        core.busy = True
        core._turn = lambda: True  # type: ignore[method-assign]
        tier.keep(one, 0)
        tier.snapshot(one)
        await until(lambda: ring.puts == 4)
        assert set(ring.entries) == {key.digest for key in one.keys[:4]}
        tier.snapshot(one)
        tier._write_back.forget(one.keys[:1])
        tier.snapshot(one)
        await until(lambda: ring.puts == 5)  # nothing is written twice but what was lost
        core._turn = lambda: False  # type: ignore[method-assign]


async def test_a_page_that_is_reclaimed_before_it_is_written_is_left_out() -> None:
    ring = Ring()
    async with worker(ring) as (core, tier):
        one = await holding(core, PROMPT, computed=16)
        await core.call(lambda: core.pages.drop([one.keys[1].digest]))
        tier.keep(one, 0)
        await until(lambda: ring.puts == 3)
        assert one.keys[1].digest not in ring.entries
