"""The feature cache: what it takes from where, and that no answer is older than its question."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.bus.codec import decode
from pdbus.caching.feature_key import FeatureKey, feature_name, named_key, source_root
from pdbus.context import Deadline, RequestContext
from pdbus.errors import DeadlineExceeded, Unavailable
from pdbus.router.cache_control import CacheControl
from pdbus.router.feature_source import Feature
from pdbus.router.features import FeatureCache, Features
from tests.support.feature_entries import DictEntries

ROOT = source_root("m", "s")
ANY = CacheControl()


@dataclass
class Source:
    """Items are numbered; each has a counter for a value. A fetch reads it at once, and answers when it is let go."""

    kind: str = "test"
    root: bytes = ROOT
    told: str = "1"
    values: dict[int, int] = field(default_factory=dict)
    fetches: list[tuple[list[int], asyncio.Future[None]]] = field(default_factory=list)
    free: bool = False
    """Fetches are answered at once."""

    def key(self, item: int) -> FeatureKey:
        return named_key(model="m", subject="s", item=str(item))

    def valid(self, value: bytes) -> bool:
        return True

    async def version(self, ctx: RequestContext) -> str:
        return self.told

    async def fetch(self, items: Sequence[int], ctx: RequestContext) -> Sequence[Feature]:
        found = [Feature(self.told, b"%d" % self.values.get(item, 0)) for item in items]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fetches.append((list(items), future))
        if not self.free:
            try:
                async with ctx.deadline.timeout():
                    await future
            except TimeoutError:
                raise DeadlineExceeded("too late") from None
        return found

    def change(self, item: int, entries: DictEntries) -> None:
        self.values[item] = self.values.get(item, 0) + 1
        entries.delete_name(feature_name("m", str(item)))


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


async def get(cache: FeatureCache, source: Source, *items: int, seconds: float = 10) -> Features:
    return await cache.get(source, items, RequestContext.after(seconds), ANY)


@pytest.fixture
def entries() -> DictEntries:
    return DictEntries()


async def test_a_joined_flight_that_fails_is_begun_anew(entries: DictEntries):
    source = Source()
    async with FeatureCache(entries, 60) as cache:
        first = asyncio.create_task(get(cache, source, 1))
        await settle()
        second = asyncio.create_task(get(cache, source, 1))
        await settle()
        assert len(source.fetches) == 1
        source.fetches[0][1].set_exception(Unavailable("no"))
        await settle()
        assert len(source.fetches) == 2
        source.fetches[1][1].set_result(None)
        assert (await second).values == (b"0",)
        with pytest.raises(Unavailable):
            await first


async def test_another_s_shorter_deadline_is_not_one_s_own(entries: DictEntries):
    source = Source()
    async with FeatureCache(entries, 60) as cache:
        first = asyncio.create_task(get(cache, source, 1, seconds=0.05))
        await settle()
        second = asyncio.create_task(get(cache, source, 1))
        with pytest.raises(DeadlineExceeded):
            await first
        source.free = True
        for _, future in source.fetches:
            if not future.done():
                future.set_result(None)
        assert (await second).values == (b"0",)


async def test_entries_of_another_version_are_deleted_and_had_anew(entries: DictEntries):
    source = Source(free=True)
    async with FeatureCache(entries, 60) as cache:
        await get(cache, source, 1, 2)
        await cache.drain(Deadline.after(30))
        source.told, source.values[1] = "2", 7
        found = await get(cache, source, 1)
        await cache.drain(Deadline.after(30))
        assert (found.version, found.values, found.hits) == ("2", (b"7",), 0)
        kept = {decode(Feature, value).version for _, _, value, _ in entries.stored.values()}
        assert kept == {"1", "2"}, "item 2 was not read"
        await cache.get(source, [2], RequestContext.after(30), CacheControl(store=False))
        await cache.drain(Deadline.after(30))
        assert [decode(Feature, value).version for _, _, value, _ in entries.stored.values()] == ["2"]


async def test_what_is_in_flight_is_given_up_when_the_cache_ends(entries: DictEntries):
    source = Source()
    async with FeatureCache(entries, 60) as cache:
        asking = asyncio.create_task(get(cache, source, 1))
        await settle()
    assert (await asyncio.gather(asking, return_exceptions=True))[0] is not None
    assert cache.idle


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("get"), st.lists(st.integers(0, 2), min_size=1, max_size=3)),
        st.tuples(st.just("answer"), st.integers(0, 5)),
        st.tuples(st.just("change"), st.integers(0, 2)),
        st.tuples(st.just("turns"), st.integers(1, 4)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_no_answer_is_older_than_its_question_and_no_stale_entry_stays(steps: list[tuple[str, Any]]):
    async def run() -> None:
        entries, source = DictEntries(), Source()
        asked: list[tuple[asyncio.Task[Features], list[int], list[int]]] = []
        async with FeatureCache(entries, 60) as cache:
            for step, what in steps:
                if step == "get":
                    least = [source.values.get(item, 0) for item in what]
                    asked.append((asyncio.create_task(get(cache, source, *what)), what, least))
                elif step == "answer":
                    waiting = [future for _, future in source.fetches if not future.done()]
                    if waiting:
                        waiting[what % len(waiting)].set_result(None)
                elif step == "change":
                    source.change(what, entries)
                else:
                    for _ in range(what):
                        await asyncio.sleep(0)
            source.free = True
            for _ in range(4):
                for _, future in source.fetches:
                    if not future.done():
                        future.set_result(None)
                await settle()
            for task, _, least in asked:
                found = [int(value or b"-1") for value in (await task).values]
                assert all(value >= floor for value, floor in zip(found, least, strict=True))
            await cache.drain(Deadline.after(30))
            for item in range(3):
                stored = entries.stored.get(source.key(item).key)
                if stored:
                    assert decode(Feature, stored[2]).value == b"%d" % source.values.get(item, 0)

    asyncio.run(run())
