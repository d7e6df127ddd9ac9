"""Each token reaches the client once and in order, and nothing stays held, whatever workers and bus do (G1, G7, G8)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from loadtest.simulated import SimulatedWorker
from loadtest.simulated_answers import letters
from pdbus.context import RequestContext
from pdbus.errors import Conflict, InvalidRequest, Overloaded, PdbusError, RootGone, Unavailable
from pdbus.messages.common import Ticket
from pdbus.messages.router import TokenFrame, TokenItem
from pdbus.messages.workers import Resend, ResendReply
from pdbus.subjects import TOKENS
from tests.support.completing import (
    FRAME_FAULTS,
    LENGTH,
    complete,
    completion,
    expected,
    promise,
    stream,
    text_of,
    with_items,
)
from tests.support.router_rig import Rig, rig, until


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("fault", FRAME_FAULTS)
async def test_frames_lost_repeated_reordered_or_foreign(http: aiohttp.ClientSession, fault: str, leg: str):
    async with rig() as r:
        worker = (r.prefills if leg == "prefill" else r.decodes)[0]
        worker.behaviour.tamper = FRAME_FAULTS[fault]()
        await promise(http, r)
        assert len(r.prefills[0].tickets) == 1, "one attempt was enough"


async def test_the_last_frame_lost_is_asked_for_after_a_moment_of_silence(http: aiohttp.ClientSession):
    async with rig() as r:
        r.decodes[0].behaviour.tamper = lambda frame: [] if frame.items[0].finish else [frame]
        begun = time.monotonic()
        await promise(http, r)
        assert time.monotonic() - begun > 0.2
        assert r.decodes[0].resends >= 1


async def test_a_worker_that_is_asked_too_much_at_once_is_asked_again(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    """It has refused a question, and not the request."""
    answers = SimulatedWorker._on_resend
    refused: list[Resend] = []

    async def on_resend(worker: SimulatedWorker, message: Resend, ctx: RequestContext) -> ResendReply:
        if not refused:
            refused.append(message)
            raise Overloaded("too many questions")
        return await answers(worker, message, ctx)

    monkeypatch.setattr(SimulatedWorker, "_on_resend", on_resend)
    async with rig() as r:
        r.decodes[0].behaviour.tamper = lambda frame: [] if frame.items[0].finish else [frame]
        await promise(http, r)
        assert refused
        assert len(r.prefills[0].tickets) == 1, "one attempt was enough"


async def test_tokens_of_a_foreign_root_alone_are_never_shown(http: aiohttp.ClientSession):
    """G1: rather no answer than one of two versions."""
    async with rig() as r:
        r.decodes[0].behaviour.tamper = lambda frame: [with_items(frame, root=b"x" * 32)]
        r.decodes[0].behaviour.fail_at = 10**6
        while not r.router.frontend.metrics.dropped_items:  # on a busy machine the deadline may come before any token
            body = completion(timeout=0.25)  # before it would be asked for again
            async with http.post(r.url + "/v1/completions", json=body) as response:
                assert response.status == 504
        await r.until_idle()


@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("away"), RootGone("dropped"), Conflict("formats")])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_refusal_sends_the_request_elsewhere(http: aiohttp.ClientSession, leg: str, error: PdbusError):
    async with rig(prefills=2, decodes=2) as r:
        workers = r.prefills if leg == "prefill" else r.decodes
        workers[0].behaviour.refuse = error
        for _ in range(4):
            await promise(http, r)
        assert len(workers[1].tickets) >= 4


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_refusal_that_all_would_give_is_told(http: aiohttp.ClientSession, leg: str):
    async with rig(prefills=2, decodes=2) as r:
        for worker in r.prefills if leg == "prefill" else r.decodes:
            worker.behaviour.refuse = InvalidRequest("too hot", param="temperature")
        async with http.post(r.url + "/v1/completions", json=completion()) as response:
            told = await response.json()
        assert response.status == 400
        assert told["error"]["param"] == "temperature"
        await r.until_idle()


@pytest.mark.parametrize("at", [0, 1, 7, LENGTH - 1])
async def test_an_attempt_that_fails_in_mid_answer_is_continued_with_the_sametext(http: aiohttp.ClientSession, at: int):
    """Seeded and sampled: the next worker draws what the first one would have drawn."""
    async with rig(prefills=2, decodes=2) as r:
        failing = [r.prefills[0], r.decodes[0]]
        for worker in failing:
            worker.behaviour.fail_at = at
        later: list[Ticket] = []
        for _ in range(40):  # which of two idle workers is taken is left to chance
            answer = await promise(http, r, temperature=1, seed=5)
            assert answer["usage"]["completion_tokens"] == LENGTH
            later = [ticket for worker in r.prefills for ticket in worker.tickets if ticket.attempt > 1]
            if later:
                break
        assert later
        assert any(ticket.delivered for ticket in later) or at == 0


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_worker_that_dies_in_mid_answer(http: aiohttp.ClientSession, leg: str):
    async with rig(prefills=2, decodes=2) as r:
        for worker in r.workers:
            worker.behaviour.step_s = 0.02
        chunks, dead = [], None
        begun = time.monotonic()
        async for chunk in stream(http, r):
            chunks.append(chunk)
            if len(chunks) >= 3 and dead is None:
                holders = [worker for worker in (r.prefills if leg == "prefill" else r.decodes) if worker.tickets]
                dead = holders[0]
                await dead.die()
        assert dead is not None
        assert "".join(text_of(chunk) for chunk in chunks) == expected(dead)
        assert time.monotonic() - begun < 30
        others = [worker for worker in r.workers if worker is not dead]
        await until(lambda: not any(w.held or w.kept for w in others) and not r.router.cancels.open)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_stop_string_that_a_dying_worker_has_half_told_still_ends_it(
    http: aiohttp.ClientSession, streamed: bool
):
    """What was held back of it belongs to the answer, not to the attempt."""
    async with rig(decodes=2) as r:
        whole = text_of(await promise(http, r))
        stop = whole[7:11]
        assert whole.index(stop) == 7
        for worker in r.decodes:
            worker.behaviour.fail_at, worker.tickets[:] = 9, []
        asking = asyncio.create_task(_text(http, r, streamed, stop=stop))
        await until(lambda: sum(len(worker.tickets) for worker in r.decodes) > 1)
        for worker in r.decodes:
            worker.behaviour.fail_at = None
        assert await asking == whole[:7]
        await r.until_idle()


async def _text(http: aiohttp.ClientSession, r: Rig, streamed: bool, **fields: Any) -> str:
    if streamed:
        return "".join([text_of(chunk) async for chunk in stream(http, r, **fields)])
    return text_of(await complete(http, r, **fields))


async def test_a_worker_that_hangs_is_left_after_its_cards_stop(http: aiohttp.ClientSession):
    async with rig(decodes=2) as r:
        for worker in r.decodes:
            worker.behaviour.step_s = 0.02
        begun = time.monotonic()
        text, hung = "", None
        async for chunk in stream(http, r):
            text += text_of(chunk)
            if len(text) >= 4 and hung is None:
                hung = next(worker for worker in r.decodes if worker.tickets)
                await hung.hang()
        assert hung is not None
        assert text == expected(hung)
        assert time.monotonic() - begun < 30


async def test_a_worker_whose_engine_hangs_is_left_at_its_word_and_not_chosen_again(http: aiohttp.ClientSession):
    """Its event loop lives: it sends cards, accepts, and says of every answer that it is at work."""
    async with rig(decodes=2) as r:
        for worker in r.decodes:
            worker.behaviour.step_s = 0.02
        text, hung = "", None
        async for chunk in stream(http, r):
            text += text_of(chunk)
            if len(text) >= 4 and hung is None:
                hung = next(worker for worker in r.decodes if worker.tickets)
                await hung.engine_hangs()
        assert hung is not None
        assert text == expected(hung)
        taken = len(hung.tickets)
        for _ in range(3):
            await complete(http, r)
        assert len(hung.tickets) == taken


@pytest.mark.parametrize("fault", FRAME_FAULTS)
async def test_an_answer_that_moves_is_whole_whatever_becomes_of_its_frames(http: aiohttp.ClientSession, fault: str):
    async with rig(decodes=2) as r:
        for source, target in (r.decodes, r.decodes[::-1]):
            source.behaviour.tamper = FRAME_FAULTS[fault]()
            source.behaviour.move_to = target.id
        r.decodes[0].behaviour.move_at = r.decodes[1].behaviour.move_at = 9
        answer = await promise(http, r, temperature=1, seed=3)
        assert answer["usage"]["completion_tokens"] == LENGTH
        moved = next(ticket for worker in r.decodes for ticket in worker.tickets if ticket.attempt == 2)
        assert len(moved.delivered) == 9
        assert len(r.prefills[0].tickets) == 1, "nobody else had to read it"


@pytest.mark.parametrize("state", ["dead", "draining", "unknown", "refuses"])
async def test_an_answer_whose_target_can_not_take_it_goes_on_elsewhere(http: aiohttp.ClientSession, state: str):
    async with rig(decodes=3, local_tokens=10**6) as r:
        source, target, _ = r.decodes
        for worker in r.decodes[1:]:
            worker.behaviour.refuse = Overloaded("full")  # so that the first attempt is the source's
        source.behaviour.move_at, source.behaviour.move_to = 5, "nobody" if state == "unknown" else target.id
        source.behaviour.step_s = 0.02
        text = ""
        async for chunk in stream(http, r):
            text += text_of(chunk)
            if r.decodes[2].behaviour.refuse is not None:
                r.decodes[2].behaviour.refuse = None
                if state == "dead":
                    await target.die()
                source.behaviour.refuse = Overloaded("draining")
        assert text == expected(source)


async def test_garbage_on_the_token_subject_disturbs_nobody(http: aiohttp.ClientSession):
    async with rig() as r:
        r.decodes[0].behaviour.step_s = 0.005
        asking = asyncio.create_task(promise(http, r))
        subject = TOKENS(router="r-0")
        for data in (b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03"):
            r.bus.transport.send(subject.name, data)
        for index in (-1, 10**9):
            item = TokenItem("nobody", 7, 1, b"", index, (1,))
            await r.bus.publish(subject, TokenFrame("stranger", "i", index + 2, (item,)))
        await asking
        assert r.bus.malformed >= 4


async def test_two_requests_at_once_never_mix(http: aiohttp.ClientSession):
    async with rig(prefills=2, decodes=2) as r:
        for worker in r.workers:
            worker.behaviour.step_s = 0.001
        prompts = [f"prompt {number}" for number in range(24)]
        answers = await asyncio.gather(*(complete(http, r, prompt=prompt) for prompt in prompts))
        tickets = {bytes(t.prompt).decode(): t for worker in r.prefills for t in worker.tickets}
        for prompt, answer in zip(prompts, answers, strict=True):
            assert text_of(answer) == bytes(letters(tickets[prompt])).decode()
        await r.until_idle()
