"""Routers that are restarted one after the other under load: no request fails, and no stream breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count

import aiohttp

from loadtest.simulated_answers import letters
from pdbus.bus.bus import memory_bus
from pdbus.bus.presence import Fleet
from pdbus.client import Client
from pdbus.context import Deadline
from pdbus.router.settings import RouterSettings
from pdbus.router.wiring import Router, router
from tests.support.feature_entries import DictEntries
from tests.support.router_rig import MODEL, Rig, rig, until

TOKENS = 40
STEP_S = 0.003
"""An answer takes an eighth of a second, on a machine with nothing else to do."""


@asynccontextmanager
async def another_router(r: Rig, id: str) -> AsyncIterator[Router]:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(memory_bus(r.broker))
        fleet = await stack.enter_async_context(Fleet(bus))
        await fleet.wait_for(lambda f: len(f.live("prefill")) + len(f.live("decode")) == 2, Deadline.after(30))
        settings = RouterSettings(id=id, model=MODEL, http_port=0)
        life = router(settings, bus, fleet, r.versions, r.versions, r.ring, DictEntries())
        made = await stack.enter_async_context(life)
        await made.frontend.models.get(r.roots[0], Deadline.after(30))
        yield made


def right(r: Rig, prompt: str) -> str:
    ticket = next(t for t in r.prefills[0].tickets if bytes(t.prompt).decode() == prompt)
    return bytes(letters(replace(ticket, delivered=()))).decode()


async def by_http(r: Rig, routers: list[Router], prompts: count[int]) -> None:
    """Streams, one after another, each of a router that takes new connections."""
    prompt = f"by http {next(prompts)}"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    url = f"{routers[-1].http.url}/v1/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as reply:
        assert reply.status == 200, await reply.text()
        events = [json.loads(line[6:]) async for line in reply.content if line.startswith(b"data: {")]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == right(r, prompt)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def by_bus(r: Rig, client: Client, prompts: count[int]) -> None:
    prompt = f"by bus {next(prompts)}"
    async with client.complete_stream(prompt, max_tokens=TOKENS, temperature=0) as chunks:
        text = "".join([choice["text"] async for chunk in chunks for choice in chunk["choices"]])
    assert text == right(r, prompt)


async def test_no_request_fails_and_no_stream_breaks():
    """Streams by HTTP end where they began, however late; the bus gives new requests to the others."""
    async with rig(local_tokens=0) as r, memory_bus(r.broker) as own:
        for worker in r.workers:
            worker.behaviour.step_s = STEP_S
        client, prompts, ended = Client(own, MODEL, timeout_s=60), count(), asyncio.Event()
        routers, answered = [r.router], 0

        async def ask_on(*, bus: bool) -> None:
            nonlocal answered
            while not ended.is_set():
                await (by_bus(r, client, prompts) if bus else by_http(r, routers, prompts))
                answered += 1

        asking = [asyncio.create_task(ask_on(bus=number % 2 == 0)) for number in range(4)]
        async with AsyncExitStack() as later:
            for id in ("r-1", "r-2"):
                leaving = routers[-1]
                routers.append(await later.enter_async_context(another_router(r, id)))
                await until(lambda leaving=leaving: leaving.frontend.admission.running > 1)  # type: ignore[misc]
                await leaving.stop_intake()
                await leaving.frontend.admission.wait_idle()
                before = answered
                await until(lambda before=before: answered > before + 4)  # type: ignore[misc]
            ended.set()
            await asyncio.gather(*asking)
        await r.until_idle()


async def test_a_stream_on_the_bus_is_handed_over_where_it_takes_longer_than_the_drain():
    async with rig() as r, memory_bus(r.broker) as own:
        for worker in r.workers:
            worker.behaviour.step_s = STEP_S
        client, got = Client(own, MODEL, timeout_s=60), []
        async with another_router(r, "r-1") as other:
            await other.infer.stop()  # so that the request goes to the one that leaves
            async with client.complete_stream("long", max_tokens=TOKENS, temperature=0) as chunks:
                async for chunk in chunks:
                    got.append(chunk)
                    if len(got) == 5:
                        await other.infer.start()
                        await r.router.stop_intake()
                        await r.router.infer.close()  # the drain's time is up
            assert "".join(choice["text"] for chunk in got for choice in chunk["choices"]) == right(r, "long")
            assert len({chunk["id"] for chunk in got}) == 1
            assert r.router.frontend.admission.running == 0
        await r.until_idle()
