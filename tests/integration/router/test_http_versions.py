"""Answers of the right version, whether computed or kept: refs, the result cache, idempotency keys."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from pdbus.bus.bus import memory_bus
from pdbus.context import RequestContext
from pdbus.errors import RootGone
from pdbus.messages.router import RefStatsWanted
from pdbus.subjects import REF_STATS
from tests.support.http_front import BODY, post
from tests.support.router_rig import MODEL, Rig, rig, until

VERSIONS = 2
"""Of the rig `r`."""


async def test_a_greedy_answer_comes_from_the_cache_the_second_time(http: aiohttp.ClientSession, r: Rig):
    body = BODY | {"logprobs": 2, "echo": True, "stop": ["zz"]}
    _, first, headers = await post(http, r, body)
    assert headers["X-Result-Cache"] == "miss"
    _, second, headers = await post(http, r, body)
    assert headers["X-Result-Cache"] == "hit"
    assert second["choices"] == first["choices"]
    assert second["usage"]["completion_tokens"] == first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"]
    assert len(r.prefills[0].tickets) == 1


async def test_whole_and_streamed_answers_share_an_entry(http: aiohttp.ClientSession, r: Rig):
    _, whole, _ = await post(http, r)
    async with http.post(r.url + "/v1/completions", json=BODY | {"stream": True}) as response:
        assert response.headers["X-Result-Cache"] == "hit"
        lines = (await response.text()).split("\n\n")
    assert json.loads(lines[0][6:])["choices"][0]["text"] == whole["choices"][0]["text"]
    assert lines[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    ("change", "source"),
    [({"temperature": 1}, "bypass"), ({"temperature": 1, "seed": 3}, "miss"), ({"temperature": None}, "bypass")],
)
async def test_only_greedy_and_seeded_answers_are_kept(http: aiohttp.ClientSession, r: Rig, change: Any, source: str):
    for expected in (source, "hit" if source == "miss" else "bypass"):
        _, _, headers = await post(http, r, BODY | change)
        assert headers["X-Result-Cache"] == expected


async def test_cache_control(http: aiohttp.ClientSession, r: Rig):
    await post(http, r, Cache_Control="no-store")
    assert not r.ring.entries
    await post(http, r, Cache_Control="no-cache")
    assert len(r.ring.entries) == 1
    assert r.ring.gets == 0
    await post(http, r, Cache_Control="max-age=7")
    assert r.ring.max_ages == [7]


async def test_nothing_but_whole_answers_is_kept(http: aiohttp.ClientSession, r: Rig):
    for worker in r.workers:
        worker.behaviour.step_s = 0.02
    async with http.post(r.url + "/v1/completions", json=BODY | {"max_tokens": 200, "stream": True}) as response:
        await response.content.readline()
        response.close()
    await r.until_idle()
    await post(http, r, BODY | {"max_tokens": 200, "timeout": 0.2})
    await r.until_idle()
    assert not r.ring.entries


async def test_answers_of_another_version_are_never_taken(http: aiohttp.ClientSession, r: Rig):
    """G4."""
    await post(http, r)
    r.versions.move("stable", r.roots[1])
    _, answer, headers = await post(http, r)
    assert headers["X-Result-Cache"] == "miss"
    assert answer["system_fingerprint"] == "root-" + r.roots[1].hex()
    r.versions.move("stable", r.roots[0])
    _, _, headers = await post(http, r)
    assert headers["X-Result-Cache"] == "hit"


async def test_versions_are_asked_for_by_ref_root_and_fingerprint(http: aiohttp.ClientSession, r: Rig):
    r.versions.move("canary", r.roots[1])
    for name in ("canary", r.roots[1].hex(), r.roots[1].hex()[:12], "root-" + r.roots[1].hex()):
        _, answer, _ = await post(http, r, BODY | {"model": f"{MODEL}@{name}"})
        assert answer["system_fingerprint"] == "root-" + r.roots[1].hex()
        assert answer["model"] == f"{MODEL}@{name}"
    assert {ticket.root for ticket in r.prefills[0].tickets} == {r.roots[1]}


async def test_what_requests_met_is_told_by_ref_and_version(http: aiohttp.ClientSession, r: Rig):
    """By this a canary is held against stable."""
    r.versions.move("canary", r.roots[1])
    for ref, count in (("stable", 1), ("canary", 2), (r.roots[0].hex(), 1)):
        for number in range(count):
            await post(http, r, BODY | {"model": f"{MODEL}@{ref}", "prompt": f"{ref} {number}"})
    r.versions.move("stable", r.roots[1])
    for _ in range(2):
        await post(http, r)
    async with memory_bus(r.broker) as bus:
        told = await bus.call(REF_STATS(router="r-0"), RefStatsWanted(), RequestContext.after(30))
    found = {(figures.ref, figures.root): figures for figures in told.refs}
    assert {key: figures.requests for key, figures in found.items()} == {
        ("stable", r.roots[0]): 1,
        ("canary", r.roots[1]): 2,
        ("(version)", r.roots[0]): 1,
        ("stable", r.roots[1]): 2,
    }
    assert len(found["canary", r.roots[1]].first_token_s) == len(found["canary", r.roots[1]].per_token_s) == 2
    assert len(found["stable", r.roots[1]].first_token_s) == 1, "the other came out of the result cache"
    assert not any(figures.errors for figures in told.refs)


async def test_without_a_confirmed_log_no_ref_is_served(http: aiohttp.ClientSession, r: Rig):
    """G3: rather refuse than serve an older version; a request that names its root is not concerned."""
    r.versions.confirmed_age_s = 5.1
    for model in (MODEL, f"{MODEL}@stable"):
        status, told, headers = await post(http, r, BODY | {"model": model})
        assert (status, told["error"]["code"]) == (503, "unavailable")
        assert headers["x-should-retry"] == "true"
    async with http.get(r.url + "/readyz") as response:
        assert response.status == 503
    status, _, _ = await post(http, r, BODY | {"model": f"{MODEL}@{r.roots[0].hex()}"})
    assert status == 200
    r.versions.confirmed_age_s = 1.0
    assert (await post(http, r))[0] == 200


async def test_a_ref_that_its_maker_asks_for_at_once_is_looked_for_in_the_log(http: aiohttp.ClientSession, r: Rig):
    r.versions.unread.append(("new", r.roots[1]))
    status, told, _ = await post(http, r, BODY | {"model": f"{MODEL}@new"})
    assert (status, told["system_fingerprint"]) == (200, "root-" + r.roots[1].hex())
    assert (await post(http, r, BODY | {"model": f"{MODEL}@nowhere"}))[0] == 404


async def test_who_waits_for_a_version_that_is_given_up_is_told_at_once(http: aiohttp.ClientSession):
    async with rig(versions=2) as r:
        for worker in r.workers:
            worker.behaviour.refuse = RootGone("dropped")
        body = BODY | {"model": f"{MODEL}@{r.roots[1].hex()}", "timeout": 600}
        asked = asyncio.create_task(post(http, r, body))
        await until(lambda: r.prefills[0].refused > 0)
        r.versions.forget(r.roots[1])
        status, told, _ = await asyncio.wait_for(asked, 60)
        assert (status, told["error"]["code"]) == (503, "root_gone")
        await r.until_idle()


async def test_a_ref_that_moves_while_a_request_waits_is_followed(http: aiohttp.ClientSession):
    async with rig(versions=2, max_inflight=1) as r:
        r.prefills[0].behaviour.mute = True
        first = asyncio.create_task(post(http, r, BODY | {"prompt": "first", "max_tokens": 20}))
        await until(lambda: bool(r.prefills[0].tickets))
        waiting = asyncio.create_task(post(http, r))
        await until(lambda: r.router.frontend.admission.waiting > 0)
        r.versions.move("stable", r.roots[1])
        r.prefills[0].behaviour.mute = False
        assert (await first)[1]["system_fingerprint"] == "root-" + r.roots[0].hex()
        assert (await waiting)[1]["system_fingerprint"] == "root-" + r.roots[1].hex()


async def test_the_same_idempotency_key_gives_the_same_answer(http: aiohttp.ClientSession, r: Rig):
    body = BODY | {"temperature": 1}
    answers = await asyncio.gather(*(post(http, r, body, Idempotency_Key="k") for _ in range(3)))
    assert len({json.dumps(answer["choices"]) for _, answer, _ in answers}) == 1
    assert len(r.prefills[0].tickets) == 1, "worked out once"
    _, other, _ = await post(http, r, body, Idempotency_Key="l")
    assert other["choices"] != answers[0][1]["choices"]
    status, told, _ = await post(http, r, body | {"prompt": "another"}, Idempotency_Key="k")
    assert (status, told["error"]["code"]) == (409, "conflict")


async def test_an_invalid_request_leaves_its_idempotency_key_free(http: aiohttp.ClientSession, r: Rig):
    for _ in range(2):
        refused = [post(http, r, BODY | {"max_tokens": 10**6}, Idempotency_Key="k") for _ in range(3)]
        assert {status for status, _, _ in await asyncio.gather(*refused)} == {400}
    status, _, _ = await post(http, r, Idempotency_Key="k")
    assert status == 200
    status, _, _ = await post(http, r, BODY | {"max_tokens": 10**6}, Idempotency_Key="k")
    assert status == 409, "used by now"
