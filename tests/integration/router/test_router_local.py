"""What test_router_faults.py promises, where the decode worker reads the prompt itself and sends every token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import aiohttp
import pytest

from loadtest.simulated_answers import letters
from pdbus.errors import Conflict, InvalidRequest, Overloaded, PdbusError, RootGone, Unavailable
from pdbus.messages.presence import WHOLE_PROMPTS
from tests.support.completing import (
    FRAME_FAULTS,
    LENGTH,
    complete,
    completion,
    expected,
    promise,
    stream,
    text_of,
)
from tests.support.router_rig import Rig, rig, until


@pytest.mark.parametrize("fault", FRAME_FAULTS)
async def test_frames_lost_repeated_reordered_or_foreign(http: aiohttp.ClientSession, fault: str):
    async with rig(prefills=0) as r:
        r.decodes[0].behaviour.tamper = FRAME_FAULTS[fault]()
        await promise(http, r)
        assert len(r.decodes[0].tickets) == 1, "one attempt was enough"


async def test_a_single_token_lost_is_asked_for_after_a_moment_of_silence(http: aiohttp.ClientSession):
    async with rig(prefills=0) as r:
        r.decodes[0].behaviour.tamper = lambda frame: []
        begun = time.monotonic()
        await promise(http, r, max_tokens=1)
        assert time.monotonic() - begun > 0.2
        assert r.decodes[0].resends >= 1


async def test_a_prompts_log_probabilities_come_with_the_first_token(http: aiohttp.ClientSession):
    async with rig(prefills=0) as r:
        r.decodes[0].behaviour.tamper = FRAME_FAULTS["first lost"]()
        answer = await complete(http, r, echo=True, logprobs=2)
        listed = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert len(listed) == answer["usage"]["total_tokens"]
        assert listed[0] is None
        await r.until_idle()


@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("away"), RootGone("dropped"), Conflict("formats")])
async def test_a_refusal_sends_the_request_elsewhere(http: aiohttp.ClientSession, error: PdbusError):
    async with rig(prefills=0, decodes=2) as r:
        r.decodes[0].behaviour.refuse = error
        for _ in range(4):
            await promise(http, r)
        assert len(r.decodes[1].tickets) >= 4


async def test_a_refusal_that_all_would_give_is_told(http: aiohttp.ClientSession):
    async with rig(prefills=0, decodes=2) as r:
        for worker in r.decodes:
            worker.behaviour.refuse = InvalidRequest("too hot", param="temperature")
        async with http.post(r.url + "/v1/completions", json=completion()) as response:
            assert response.status == 400
        await r.until_idle()


@pytest.mark.parametrize("at", [0, 1, 7, LENGTH - 1])
async def test_an_attempt_that_fails_in_mid_answer_is_continued_with_the_same_text(
    http: aiohttp.ClientSession, at: int
):
    async with rig(prefills=0, decodes=2, local_tokens=WHOLE_PROMPTS) as r:
        failing, other = r.decodes
        failing.behaviour.fail_at = at
        for number in range(40):  # which of two idle workers is taken is left to chance
            answer = await complete(http, r, prompt=f"{number}: another prompt each time", temperature=1, seed=5)
            if later := [ticket for ticket in other.tickets if ticket.attempt > 1]:
                assert len(later[0].delivered) == at
                assert text_of(answer) == bytes(letters(replace(later[0], delivered=()))).decode()
                await r.until_idle()
                return
        pytest.fail("the failing worker was never taken")


@pytest.mark.parametrize("first", ["local", "remote"])
async def test_a_retry_may_be_read_elsewhere_and_the_text_stays_the_same(http: aiohttp.ClientSession, first: str):
    """The worker that fails is the only one of its way; what it had delivered is a forced prefix of the other."""
    async with rig(prefills=1, decodes=2) as r:
        colocated, other = r.decodes
        for worker in r.workers:
            worker.behaviour.step_s = 0.02
        seen, died = "", False
        if first == "local":
            colocated.local_tokens = WHOLE_PROMPTS
            await until(lambda: any(card.local_tokens for card in r.fleet.live("decode")))
        async for chunk in stream(http, r, temperature=1, seed=5):
            seen += text_of(chunk)
            if len(seen) >= 5 and not died:
                died = True
                if first == "local":
                    assert colocated.tickets
                    await colocated.die()
                else:
                    victim = next(worker for worker in r.decodes if worker.tickets)
                    victim.behaviour.step_s = 60.0  # so that the answer is not over before it dies
                    other.local_tokens = colocated.local_tokens = WHOLE_PROMPTS
                    await until(lambda: all(card.local_tokens for card in r.fleet.live("decode")))
                    await victim.die()
        tickets = [ticket for worker in r.workers for ticket in worker.tickets if ticket.attempt > 1]
        assert tickets
        assert all(len(ticket.delivered) >= 5 for ticket in tickets)
        assert bool(any(t.attempt > 1 for t in r.prefills[0].tickets)) == (first == "local")
        assert seen == expected(next(worker for worker in r.workers if worker.tickets))


async def test_a_worker_that_dies_in_mid_answer(http: aiohttp.ClientSession):
    async with rig(prefills=0, decodes=2) as r:
        for worker in r.workers:
            worker.behaviour.step_s = 0.02
        seen, dead = "", None
        begun = time.monotonic()
        async for chunk in stream(http, r):
            seen += text_of(chunk)
            if len(seen) >= 5 and dead is None:
                dead = next(worker for worker in r.decodes if worker.tickets)
                await dead.die()
        assert dead is not None
        assert seen == expected(dead)
        assert time.monotonic() - begun < 30
        (other,) = (worker for worker in r.decodes if worker is not dead)
        await until(lambda: not other.held and not other.kept and not r.router.cancels.open)


async def test_a_worker_that_hangs_is_left_after_its_cards_stop(http: aiohttp.ClientSession):
    async with rig(prefills=0, decodes=2) as r:
        for worker in r.decodes:
            worker.behaviour.step_s = 0.02
        seen, hung = "", None
        async for chunk in stream(http, r):
            seen += text_of(chunk)
            if len(seen) >= 4 and hung is None:
                hung = next(worker for worker in r.decodes if worker.tickets)
                await hung.hang()
        assert hung is not None
        assert seen == expected(hung)


@pytest.mark.parametrize("after", [0, 1, 6])
async def test_a_client_that_goes_away_frees_everything_everywhere(http: aiohttp.ClientSession, after: int):
    async with rig(prefills=0, decodes=2) as r:
        for worker in r.workers:
            worker.behaviour.step_s = 0.05
            worker.behaviour.mute = after == 0
        asking = asyncio.create_task(_read(http, r, after))
        if after == 0:
            await until(lambda: r.router.hub.listening_for == 3)
            asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await r.until_idle()


async def _read(http: aiohttp.ClientSession, r: Rig, events: int) -> None:
    """Goes away after so many events. The rest of the answer would take hours: what is idle soon was cancelled."""
    body = completion(stream=True, max_tokens=200, n=3)
    async with http.post(r.url + "/v1/completions", json=body) as response:
        seen = 0
        async for line in response.content:
            seen += line.startswith(b"data")
            if seen >= events:
                for worker in r.workers:
                    worker.behaviour.step_s = 60.0
                response.close()
                return


async def test_a_lost_cancel_is_repeated_until_it_is_answered(http: aiohttp.ClientSession):
    async with rig(prefills=0) as r:
        r.decodes[0].behaviour.step_s = 0.05
        r.decodes[0].behaviour.deaf_cancels = 2
        await _read(http, r, 1)
        await r.until_idle()
