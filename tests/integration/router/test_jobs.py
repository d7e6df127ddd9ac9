"""Durable jobs on a real nats-server: accepted once, answered once, whichever router dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from pdbus.bus.bus import Bus, connect
from pdbus.bus.presence import Fleet
from pdbus.client import Client
from pdbus.errors import Cancelled, Conflict, DeadlineExceeded, InvalidRequest, NotFound, PdbusError
from pdbus.messages.jobs import JobEntry, JobSubmit
from pdbus.router.idempotency import seed_of
from pdbus.router.identity import OPEN
from pdbus.router.settings import RouterSettings
from pdbus.router.wiring import Router, router
from pdbus.subjects import RESULTS
from tests.support.feature_entries import DictEntries
from tests.support.router_rig import Rig, rig, until

Unique = Callable[[str], str]
ASK: dict[str, Any] = {"prompt": "Work that must not be lost", "max_tokens": 12, "temperature": 1.0}


@dataclass
class World:
    r: Rig
    client: Client
    model: str

    async def entries(self, job: str) -> list[JobEntry]:
        to, found, after = RESULTS(tenant=OPEN.tenant, job=job), [], 0
        while record := await self.r.bus.logs.next(to, after):
            found.append(record.entry)
            after = record.seq
        return found

    def behave(self, **fields: Any) -> None:
        for worker in self.r.workers:
            for name, value in fields.items():
                setattr(worker.behaviour, name, value)

    @property
    def tickets(self) -> int:
        return sum(len(worker.tickets) for worker in self.r.prefills)


@pytest.fixture
async def w(nats_url: str, unique: Unique) -> AsyncIterator[World]:
    model = unique("jobs")
    async with rig(nats_url=nats_url, model=model) as r:
        yield World(r, Client(r.bus, model, timeout_s=30), model)
        await r.until_idle()


async def test_a_job_is_answered_once_and_stays_readable(w: World) -> None:
    told = await w.client.jobs.submit("completions", ASK, idempotency_key="one", metadata={"order": "7"})
    assert told.status in ("queued", "running")
    result = await w.client.jobs.result(told.id, wait_s=30)
    assert result["object"] == "text_completion"
    assert result["usage"]["completion_tokens"] == 12
    assert [ticket.priority for ticket in w.r.prefills[0].tickets] == [0], "behind all who wait for an answer"
    state = await w.client.jobs.state(told.id)
    assert (state.status, state.status_code, state.metadata) == ("completed", 200, {"order": "7"})
    assert await w.client.jobs.result(told.id, wait_s=0) == result
    assert [entry.status for entry in await w.entries(told.id)] == ["queued", "completed"]


async def test_the_same_submission_is_the_same_job_and_another_is_refused(w: World) -> None:
    first = await w.client.jobs.submit("completions", ASK, idempotency_key="same")
    again = await asyncio.gather(*(w.client.jobs.submit("completions", ASK, idempotency_key="same") for _ in range(8)))
    assert {told.id for told in again} == {first.id}
    with pytest.raises(Conflict):
        await w.client.jobs.submit("completions", ASK | {"max_tokens": 13}, idempotency_key="same")
    await w.client.jobs.result(first.id, wait_s=30)
    assert (await w.client.jobs.submit("completions", ASK, idempotency_key="same")).status == "completed"
    assert w.tickets == 1


async def test_two_bodies_at_once_under_one_key_leave_one_job(w: World) -> None:
    bodies = [ASK | {"max_tokens": n} for n in (5, 6, 7, 8)]
    told = await asyncio.gather(
        *(w.client.jobs.submit("completions", body, idempotency_key="race") for body in bodies), return_exceptions=True
    )
    won = [n for n, it in zip((5, 6, 7, 8), told, strict=True) if not isinstance(it, BaseException)]
    assert len(won) == 1
    assert sum(isinstance(it, Conflict) for it in told) == 3
    (job,) = {it.id for it in told if not isinstance(it, BaseException)}
    assert (await w.client.jobs.result(job, wait_s=30))["usage"]["completion_tokens"] == won[0]


async def test_what_can_not_be_served_is_told_at_submission(w: World) -> None:
    with pytest.raises(InvalidRequest):
        await w.client.jobs.submit("completions", {"prompt": "x", "temperature": -1})
    with pytest.raises(InvalidRequest):
        await w.client.jobs.submit("completions", ASK | {"stream": True})
    with pytest.raises(NotFound):
        await w.client.jobs.submit("completions", ASK | {"model": "other"})
    with pytest.raises(InvalidRequest):
        await w.client.jobs.submit("completions", {"prompt": "x" * 600_000})
    for ask in (w.client.jobs.state, w.client.jobs.cancel, w.client.jobs.result):
        with pytest.raises(NotFound):
            await ask("job-0")  # type: ignore[operator]


async def test_an_error_is_a_result_too(w: World) -> None:
    told = await w.client.jobs.submit("completions", ASK | {"prompt": "x" * 5000})
    with pytest.raises(InvalidRequest, match="tokens"):
        await w.client.jobs.result(told.id, wait_s=30)
    assert (await w.client.jobs.state(told.id)).status == "failed"


async def test_progress_is_told_to_the_end(w: World) -> None:
    w.behave(step_s=0.1)
    told = await w.client.jobs.submit("completions", ASK)
    seen = [(state.status, state.tokens) async for state in w.client.jobs.progress(told.id)]
    assert seen[-1] == ("completed", 12)
    assert any(status == "running" and 0 < tokens < 12 for status, tokens in seen)


async def test_a_cancel_ends_running_work_everywhere(w: World) -> None:
    w.behave(mute=True)
    told = await w.client.jobs.submit("completions", ASK)
    await until(lambda: w.tickets == 1)
    with pytest.raises(DeadlineExceeded):
        await w.client.jobs.result(told.id, wait_s=0.2)
    assert (await w.client.jobs.cancel(told.id)).status == "cancelled"
    await w.r.until_idle()
    with pytest.raises(Cancelled):
        await w.client.jobs.result(told.id, wait_s=30)
    assert [entry.status for entry in await w.entries(told.id)] == ["queued", "cancelled"]


async def test_jobs_wait_for_those_who_wait_and_a_cancelled_one_is_never_begun(w: World) -> None:
    """Half of the slots are taken by other requests: no job begins."""
    w.behave(mute=True)
    body = {"model": w.model, "prompt": "x", "max_tokens": 4, "n": 32}
    async with aiohttp.ClientSession() as http:
        asked = [asyncio.create_task(http.post(f"{w.r.url}/v1/completions", json=body)) for _ in range(4)]
        await until(lambda: w.tickets == 128)
        told = await w.client.jobs.submit("completions", ASK | {"prompt": "first"})
        left = await w.client.jobs.submit("completions", ASK | {"prompt": "second"})
        with pytest.raises(DeadlineExceeded):
            await w.client.jobs.result(told.id, wait_s=0.3)
        await w.client.jobs.cancel(told.id)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    w.behave(mute=False)
    await w.client.jobs.result(left.id, wait_s=30)
    assert w.tickets == 129
    assert (await w.client.jobs.state(told.id)).status == "cancelled"


async def _router(w: World, nats_url: str, stack: AsyncExitStack) -> tuple[Bus, Router]:
    bus = await stack.enter_async_context(connect(nats_url, name="doomed"))
    fleet = await stack.enter_async_context(Fleet(bus))
    settings = RouterSettings(id="r-1", model=w.model, http_port=0)
    made = await stack.enter_async_context(
        router(settings, bus, fleet, w.r.versions, w.r.versions, w.r.ring, DictEntries())
    )
    await until(lambda: not made.why_not_ready())
    return bus, made


async def _watched(w: World, job: str) -> list[str]:
    return [state.status async for state in Client(w.r.bus, w.model).jobs.progress(job, timeout_s=120)]


async def test_a_job_that_every_worker_dies_of_fails_and_is_not_tried_for_a_day(w: World) -> None:
    w.behave(mute=True)
    told = await w.client.jobs.submit("completions", ASK)
    result = asyncio.create_task(w.client.jobs.result(told.id, wait_s=120))
    lives = 0
    while not result.done():
        worker = w.r.decodes[0]
        await until(lambda worker=worker: bool(worker.tickets) or result.done())  # type: ignore[misc]
        if not result.done():
            lives += 1
            await worker.die()
            (await w.r.start_again(worker)).behaviour.mute = True
    with pytest.raises(PdbusError, match="workers ended while they computed this"):
        await result
    assert lives == 5
    assert [entry.status for entry in await w.entries(told.id)] == ["queued", "failed"]


async def test_a_router_that_dies_in_mid_job_leaves_it_to_another_with_the_same_answer(w: World, nats_url: str) -> None:
    w.behave(mute=True)
    async with AsyncExitStack() as doomed:
        bus, other = await _router(w, nats_url, doomed)
        assert w.r.router.jobs is not None
        await w.r.router.jobs.stop_intake()  # the doomed one gets it
        assert other.jobs is not None
        asked = JobSubmit("completions", {"model": w.model, **ASK}, "doomed")
        told = await other.jobs.jobs.submit(asked, OPEN)
        watched = asyncio.create_task(_watched(w, told.id))  # by the doomed one: no other takes anything in
        await until(lambda: w.tickets == 1)
        await bus.transport.close()  # type: ignore[attr-defined]  # nothing that it says at its end arrives
    async with AsyncExitStack() as stack:
        w.behave(mute=False)
        _, third = await _router(w, nats_url, stack)
        result = await Client(w.r.bus, w.model, timeout_s=120).jobs.result(told.id, wait_s=120)
        await until(lambda: third.jobs is not None and third.jobs.busy == 0)
        assert (await watched)[-1] == "completed"
    w.r.router.cancels.send(w.r.prefills[0].tickets[0], tuple(worker.id for worker in w.r.workers), "client_gone")
    assert result["usage"]["completion_tokens"] == 12
    seeds = {ticket.seed for ticket in w.r.prefills[0].tickets}
    assert seeds == {seed_of(OPEN.tenant, f"pdbus {told.id}")}
    assert [entry.status for entry in await w.entries(told.id)] == ["queued", "completed"]
