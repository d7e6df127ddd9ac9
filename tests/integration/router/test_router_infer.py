"""The same requests over the bus, and the Python client that resumes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loadtest.simulated_answers import letters
from pdbus.bus.bus import Bus, memory_bus
from pdbus.client import Client
from pdbus.context import Deadline, RequestContext
from pdbus.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from pdbus.messages.router import InferReply, InferRequest
from pdbus.subjects import INFER
from tests.support.router_rig import MODEL, Rig

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def bus(r: Rig) -> AsyncIterator[Bus]:
    async with memory_bus(r.broker) as made:
        yield made


@pytest.fixture
def client(bus: Bus) -> Client:
    return Client(bus, MODEL, timeout_s=30)


def _text(chunk: dict[str, Any]) -> str:
    return "".join(choice.get("text", choice.get("delta", {}).get("content", "")) for choice in chunk["choices"])


async def test_a_whole_chat(client: Client, r: Rig):
    answer = await client.chat(MESSAGES, max_tokens=5, temperature=0)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == bytes(letters(r.prefills[0].tickets[0])).decode()
    assert answer["usage"]["completion_tokens"] == 5


async def test_a_streamed_completion(client: Client, r: Rig):
    async with client.complete_stream(
        "ab", max_tokens=6, temperature=0, stream_options={"include_usage": True}
    ) as chunks:
        told = [chunk async for chunk in chunks]
    assert "".join(map(_text, told)) == bytes(letters(r.prefills[0].tickets[0])).decode()
    assert told[-1]["usage"]["completion_tokens"] == 6
    assert (await client.complete([97, 98], max_tokens=2))["usage"]["prompt_tokens"] == 2


async def test_a_streamed_chat_tells_the_role_once(client: Client):
    async with client.chat_stream(MESSAGES, max_tokens=6) as chunks:
        told = [chunk["choices"][0] async for chunk in chunks]
    assert [choice["delta"].get("role") for choice in told] == ["assistant"] + [None] * (len(told) - 1)
    assert told[-1]["finish_reason"] == "length"


async def test_errors_are_typed(client: Client):
    with pytest.raises(InvalidRequest) as caught:
        await client.chat(MESSAGES, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(InvalidRequest):
        await client.chat(MESSAGES, tempo=9)
    with pytest.raises(NotFound):
        await client.chat(MESSAGES, model="another")
    async with client.complete_stream("x" * 5000) as chunks:
        with pytest.raises(InvalidRequest):
            await anext(chunks)


async def test_the_deadline(client: Client, r: Rig):
    r.prefills[0].behaviour.mute = True
    with pytest.raises(DeadlineExceeded):
        await client.chat(MESSAGES, timeout_s=0.3)
    with pytest.raises(DeadlineExceeded):
        await client.chat(MESSAGES, timeout=0.2)


async def test_nobody_there_is_retried_until_the_deadline(bus: Bus):
    with pytest.raises(Unavailable):
        await Client(bus, "elsewhere").chat(MESSAGES, timeout_s=0.5)


async def test_leaving_a_stream_cancels_it_everywhere(client: Client, r: Rig):
    for worker in r.workers:
        worker.behaviour.step_s = 0.02
    async with client.complete_stream("x", max_tokens=400) as chunks:
        async for _ in chunks:
            break
    await r.until_idle()


@pytest.mark.parametrize(
    "body", [{}, {"model": 1}, {"model": MODEL, "prompt": {}}, {"model": MODEL, "prompt": "x", "n": 2.5}]
)
async def test_garbage_bodies(bus: Bus, body: dict[str, Any]):
    request = InferRequest("completions", body)
    async with bus.stream(INFER(model=MODEL), request, RequestContext.after(30)) as replies:
        with pytest.raises(InvalidRequest):
            await anext(replies)


async def test_a_router_that_dies_in_mid_stream_costs_no_token(r: Rig):
    """Another router goes on under the same idempotency key: each piece once, the text as it would have been."""
    async with memory_bus(r.broker) as dying, memory_bus(r.broker) as own:
        await r.router.infer.stop()
        cut = await dying.serve(INFER(model=MODEL), _dying_after(dying, r, 4))
        client = Client(own, MODEL, timeout_s=60)
        got: list[dict[str, Any]] = []
        async with client.complete_stream(
            "ab", max_tokens=12, temperature=1, n=2, logprobs=1, stream_options={"include_usage": True}
        ) as chunks:
            async for chunk in chunks:
                got.append(chunk)
                if len(got) == 3:
                    await cut.stop()
        texts, tokens = {0: "", 1: ""}, {0: 0, 1: 0}
        for chunk in got:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                tokens[choice["index"]] += len(choice["logprobs"]["tokens"])
        tickets = {ticket.choice: ticket for ticket in r.prefills[0].tickets}
        assert texts == {i: bytes(letters(tickets[i])).decode() for i in (0, 1)}
        assert tokens == {0: 12, 1: 12}
        assert len({chunk["id"] for chunk in got}) == 1
        finishes = [choice["finish_reason"] for chunk in got for choice in chunk["choices"] if choice["finish_reason"]]
        assert finishes == ["length", "length"]
        assert got[-1]["usage"]["completion_tokens"] == 24


def _dying_after(bus: Bus, r: Rig, frames: int) -> Any:
    """A router that breaks off after some chunks; then the real one takes over."""
    from pdbus.router.identity import Identities
    from pdbus.router.infer import Infer

    inner = Infer(r.router.frontend, Identities())

    async def serve(message: InferRequest, ctx: RequestContext) -> AsyncIterator[InferReply]:
        for worker in r.workers:
            worker.behaviour.step_s = 0.005
        left = frames
        async for reply in inner(message, ctx):
            yield reply
            left -= 1
            if left == 0:
                await r.router.infer.start()
                raise Unavailable("cut off")

    return serve


async def test_one_id_of_many_callers_names_none_of_their_requests(bus: Bus, r: Rig):
    """LESSONS 8: each is answered, under an id of the router's own."""

    async def ask(prompt: str) -> str:
        ctx = RequestContext(Deadline.after(30), request_id="room-1")
        request = InferRequest("completions", {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0})
        async with bus.stream(INFER(model=MODEL), request, ctx) as replies:
            return _text((await anext(replies)).data)

    told = await asyncio.gather(*(ask(f"prompt {number}") for number in range(8)))
    tickets = {bytes(ticket.prompt).decode(): ticket for ticket in r.prefills[0].tickets}
    assert told == [bytes(letters(tickets[f"prompt {number}"])).decode() for number in range(8)]
    assert len({ticket.request_id for ticket in tickets.values()} - {"room-1"}) == 8


async def test_many_callers_at_once(client: Client, r: Rig):
    answers = await asyncio.gather(*(client.complete(f"p{n}", max_tokens=4, temperature=0) for n in range(32)))
    prompts = {bytes(ticket.prompt).decode(): ticket for ticket in r.prefills[0].tickets}
    for n, answer in enumerate(answers):
        assert answer["choices"][0]["text"] == bytes(letters(prompts[f"p{n}"])).decode()
