"""Requests go where their prefix is, within a bound, and are served all the same when the index is wrong or late."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import aiohttp
import pytest

from loadtest.simulated import SimulatedWorker
from pdbus.errors import Conflict, Overloaded, PdbusError, RootGone, Unavailable
from pdbus.messages.presence import WHOLE_PROMPTS
from pdbus.router.placement import Pair
from tests.support.completing import complete, completion, text_of
from tests.support.router_rig import MODEL, Rig, rig, until

PREFIX = "You are a helpful assistant, and you know these things by heart: "  # 4 pages and one token


def _placed(r: Rig, monkeypatch: pytest.MonkeyPatch) -> list[Pair]:
    """The pairs of all attempts from now on."""
    pairs: list[Pair] = []
    monkeypatch.setattr(r.router.frontend.metrics, "placed", pairs.append)
    return pairs


async def _index_is_right(r: Rig) -> None:
    """All that workers have has been told to the router."""
    table = r.router.index.table
    await until(lambda: all(table.keys_of(w.id) == w.pages.count for w in r.workers))


def _cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_shared_prefix_goes_to_the_worker_that_has_it(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    async with rig(prefills=4, decodes=2) as r:
        pairs = _placed(r, monkeypatch)
        await complete(http, r, prompt=PREFIX)
        for number in range(12):
            await r.until_idle()
            await _index_is_right(r)
            answer = await complete(http, r, prompt=f"{PREFIX}{number}")
            assert _cached(answer) == pairs[-1].matched_tokens == 64, "it has what it was chosen for"
        assert len({pair.prefill for pair in pairs}) == 1
        assert len({pair.decode for pair in pairs}) == 2


async def test_tenants_and_versions_do_not_share(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch):
    async with rig(versions=2) as r:
        pairs = _placed(r, monkeypatch)
        await complete(http, r, prompt=PREFIX)
        await _index_is_right(r)
        other = await complete(http, r, prompt=PREFIX, model=f"{MODEL}@{r.roots[1].hex()}")
        assert _cached(other) == pairs[-1].matched_tokens == 0
        await _index_is_right(r)
        again = await complete(http, r, prompt=PREFIX)
        assert _cached(again) == pairs[-1].matched_tokens == 64


async def test_a_hot_prefix_does_not_pin_one_worker(http: aiohttp.ClientSession):
    """LESSONS, first table, 14."""
    async with rig(prefills=4, decodes=4) as r:
        await complete(http, r, prompt=PREFIX)
        await _index_is_right(r)
        before = {worker.id: len(worker.tickets) for worker in r.workers}
        for worker in r.workers:
            worker.behaviour.mute = True  # so that all are under way at once
        asking = [asyncio.create_task(complete(http, r, prompt=f"{PREFIX}{n}", timeout=60)) for n in range(40)]
        await until(lambda: sum(len(worker.tickets) for worker in r.prefills) == 41)
        for workers in (r.prefills, r.decodes):
            counts = [len(worker.tickets) - before[worker.id] for worker in workers]
            assert max(counts) <= math.ceil(1.25 * 40 / 4) + 1, counts
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await r.until_idle()


async def test_the_worker_with_the_hottest_prefix_dies(http: aiohttp.ClientSession):
    """LESSONS, first table, 16: the next request succeeds."""
    async with rig(prefills=3) as r:
        for number in range(5):
            await complete(http, r, prompt=f"{PREFIX}{number}")
            await _index_is_right(r)
        hot = max(r.prefills, key=lambda worker: len(worker.tickets))
        assert len(hot.tickets) == 5
        await hot.die()
        async with asyncio.timeout(30):
            await complete(http, r, prompt=PREFIX)
        assert sum(len(worker.tickets) for worker in r.prefills if worker is not hot) == 1
        await until(lambda: r.router.index.table.keys_of(hot.id) == 0)


async def test_a_lost_message_of_the_index_is_repaired(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch):
    async with rig() as r:
        (worker,) = r.prefills
        worker.pages.lost = lambda message: True
        pairs = _placed(r, monkeypatch)
        await complete(http, r, prompt=PREFIX)
        await until(lambda: not worker.pages.untold)
        answer = await complete(http, r, prompt=PREFIX)
        assert (_cached(answer), pairs[-1].matched_tokens) == (64, 0), "found all the same"
        worker.pages.lost = lambda message: False
        asked = worker.pages.snapshots
        await complete(http, r, prompt="the next message tells of the gap: " + PREFIX)
        await _index_is_right(r)
        assert worker.pages.snapshots == asked + 1
        await complete(http, r, prompt=PREFIX)
        assert pairs[-1].matched_tokens == 64


async def test_keys_that_a_worker_no_longer_has_cost_a_hit_and_nothing_else(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    async with rig(prefills=2) as r:
        pairs = _placed(r, monkeypatch)
        first = await complete(http, r, prompt=PREFIX)
        await _index_is_right(r)
        for worker in r.prefills:
            worker.pages.lost = lambda message: True
            worker.pages.clear()
        answer = await complete(http, r, prompt=PREFIX)
        assert (_cached(answer), pairs[-1].matched_tokens) == (0, 64)
        assert text_of(answer) == text_of(first)


async def test_a_restarted_worker_has_nothing(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch):
    """LESSONS, first table, 15: no ghosts."""
    async with rig() as r:
        pairs = _placed(r, monkeypatch)
        await complete(http, r, prompt=PREFIX)
        await _index_is_right(r)
        (old,) = r.prefills
        await old.die()
        await r.start_again(old)
        answer = await complete(http, r, prompt=PREFIX)
        assert _cached(answer) == pairs[-1].matched_tokens == 0
        await _index_is_right(r)
        await complete(http, r, prompt=PREFIX)
        assert pairs[-1].matched_tokens == 64


async def test_a_short_rest_is_read_by_the_decode_worker(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch):
    """The next turn of a conversation finds prompt and answer where the answer was written."""
    async with rig(prefills=2, decodes=3, local_tokens=40) as r:
        pairs = _placed(r, monkeypatch)
        first = await complete(http, r, prompt=PREFIX, max_tokens=48)
        await r.until_idle()
        await _index_is_right(r)
        turn = f"{PREFIX}{text_of(first)} And then?"
        second = await complete(http, r, prompt=turn, max_tokens=48)
        remote, local = pairs
        assert remote.prefill is not None
        assert (local.prefill, local.decode) == (None, remote.decode)
        assert _cached(second) == local.matched_tokens == (len(PREFIX) + 47) // 16 * 16
        await r.until_idle()
        far = await complete(http, r, prompt=turn + "x" * 200)
        assert pairs[-1].prefill is not None
        assert _cached(far) == pairs[-1].matched_tokens


async def test_short_prompts_need_no_prefill_worker(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch):
    async with rig(decodes=2, local_tokens=16) as r:
        pairs = _placed(r, monkeypatch)
        await complete(http, r, prompt="hi")
        await complete(http, r, prompt="a prompt of 17 B.")
        assert [pair.prefill for pair in pairs] == [None, "prefill-0"]


@pytest.mark.parametrize("local_tokens", [0, WHOLE_PROMPTS])
async def test_a_fleet_without_prefill_workers_serves(http: aiohttp.ClientSession, local_tokens: int):
    async with rig(prefills=0, decodes=2, local_tokens=local_tokens) as r:
        async with http.get(r.url + "/readyz") as response:
            assert response.status == 200
        answers = [await complete(http, r, prompt=PREFIX) for _ in range(2)]
        assert len({text_of(answer) for answer in answers}) == 1
        await r.until_idle()
        async with http.post(r.url + "/v1/completions", json=completion()) as response:
            assert response.headers["X-Result-Cache"] == "miss", "it has a compute class, and so a result key"


async def test_prefill_workers_alone_are_no_fleet(http: aiohttp.ClientSession):
    async with rig(decodes=0) as r, http.get(r.url + "/readyz") as response:
        assert response.status == 503


async def test_all_prefill_workers_die(http: aiohttp.ClientSession):
    """Decode workers read the prompts then, also of requests that are under way."""
    async with rig(prefills=2, decodes=2) as r:
        for worker in r.prefills:
            worker.behaviour.mute = True
        asking = [asyncio.create_task(complete(http, r, prompt=f"{PREFIX}{n}")) for n in range(4)]
        await until(lambda: sum(len(worker.tickets) for worker in r.prefills) == 4)
        for worker in r.prefills:
            await worker.die()
        async with asyncio.timeout(30):
            for answer in await asyncio.gather(*asking):
                assert answer["usage"]["completion_tokens"] == 24
        async with asyncio.timeout(30):
            await complete(http, r, prompt=PREFIX)
        decodes: list[SimulatedWorker] = r.decodes
        await until(lambda: not any(w.held or w.kept for w in decodes) and r.router.workers.idle)


@pytest.mark.parametrize("error", [Unavailable("broken"), Conflict("formats"), RootGone("dropped")])
async def test_prefill_workers_that_break_are_done_without(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, error: PdbusError
):
    async with rig(prefills=2) as r:
        pairs = _placed(r, monkeypatch)
        for worker in r.prefills:
            worker.behaviour.refuse = error
        async with asyncio.timeout(30):
            await complete(http, r, prompt=PREFIX)
        assert [pair.prefill is None for pair in pairs] == [False, False, True]
        await r.until_idle()


async def test_full_prefill_workers_are_waited_for(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch):
    """Whole prompts would slow the answers that decode workers are writing."""
    async with rig() as r:
        pairs = _placed(r, monkeypatch)
        r.prefills[0].behaviour.refuse = Overloaded("full")
        asking = asyncio.create_task(complete(http, r, prompt=PREFIX))
        await until(lambda: len(pairs) > 3)
        r.prefills[0].behaviour.refuse = None
        await asking
        assert all(pair.prefill for pair in pairs)


async def test_a_prompt_whose_log_probabilities_are_told_shares_nothing(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    async with rig() as r:
        pairs = _placed(r, monkeypatch)
        await complete(http, r, prompt=PREFIX)
        await _index_is_right(r)
        answer = await complete(http, r, prompt=PREFIX, echo=True, logprobs=1)
        assert _cached(answer) == pairs[-1].matched_tokens == 0
