"""The same text and the same bytes from every tier, in every KV dtype."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdbus.bus.bus import memory_bus
from pdbus.bus.memory import MemoryBroker
from pdbus.context import Deadline
from pdbus.engine.rates import Rates
from pdbus.kv.codec import export_page
from pdbus.kv.format import KvDtype
from pdbus.kv.prefix import PageKey, page_keys
from pdbus.model.backend import Model
from pdbus.model.backends import EngineName
from tests.support.asking import ids, until
from tests.support.cache_nodes import Node, cache_node
from tests.support.llama import Runner
from tests.support.workers import LocalSource, Rig, rig

PROMPT = random.Random(4).choices(range(3, 320), k=70)
PAGES = 4


@asynccontextmanager
async def node(broker: MemoryBroker, workers: Rig, folder: Path) -> AsyncIterator[Node]:
    async with cache_node(broker, "c-0", 8 << 20, folder) as made:
        found = lambda: [card.incarnation for card in workers.prefill.fleet.live("cache")] == [made.bus.incarnation]  # noqa: E731
        await until(found)
        yield made


async def pages_of(workers: Rig, keys: tuple[PageKey, ...]) -> list[bytes]:
    """What the prefill worker's pool holds of these."""
    core = workers.prefill.core
    with core.pages.hold() as hold:
        await core.call(lambda: hold.match(keys))
        return [bytes(export_page(core.pool, page)) for page in hold.pages]


async def forget(workers: Rig, keys: tuple[PageKey, ...]) -> None:
    """Nothing is in the worker's own pool any more, and whatever happens to lie there now is other bytes."""
    core = workers.prefill.core
    dropped = await core.call(lambda: core.pages.drop([key.digest for key in keys]))
    assert dropped == len(keys)
    await workers.until_idle()
    pool = core.pool
    other = b"\x55" * (pool.pages * pool.format.page_bytes)
    await core.call(lambda: pool.write_bytes(slice(None), range(pool.pages), other))


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "int8"])
async def test_every_tier_gives_the_same_answer_and_the_same_bytes(
    source: LocalSource,
    model: Model,
    unique: Callable[[str], str],
    tmp_path: Path,
    kv_dtype: KvDtype,
    engine: EngineName,
) -> None:
    broker = MemoryBroker()
    async with rig(
        lambda: memory_bus(broker), source, name=unique("tiny"), kv_dtype=kv_dtype, engine=engine
    ) as workers:
        router = workers.router
        scope = workers.prefill.versions.get(router.root).scope
        keys = page_keys(PROMPT, scope)
        async with node(broker, workers, tmp_path) as first:

            async def ask(cached: int) -> list[int]:
                workers.prefill.l2.rates = Rates(
                    scope.page_format.page_bytes, 16
                )  # a tiny model is faster than any tier
                items = await router.answer(router.ticket(PROMPT, 12))
                assert items[0].cached_tokens == cached * 16
                return ids(items)

            cold = await ask(0)
            assert cold == Runner(model, kv_dtype=kv_dtype).greedy(PROMPT, 12)
            computed = await pages_of(workers, keys)
            assert [len(page) for page in computed] == [scope.page_format.page_bytes] * PAGES
            assert await ask(PAGES) == cold  # L1
            await until(lambda: all(key.digest in first.store for key in keys))
            await forget(workers, keys)
            assert await ask(PAGES) == cold  # L2
            assert await pages_of(workers, keys) == computed
            assert first.disk
            await first.disk.drain(Deadline.after(30))
        await forget(workers, keys)
        async with node(broker, workers, tmp_path) as second:
            assert len(second.store) == 0
            assert await ask(PAGES) == cold  # L3
            assert await pages_of(workers, keys) == computed
        await forget(workers, keys)
        async with node(broker, workers, tmp_path) as third:
            third.store.bury(router.root, 0.0, second=False)
            assert await ask(0) == cold
        await workers.until_idle()
