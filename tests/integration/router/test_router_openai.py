"""The official client works unchanged: answers in both forms, and errors as it knows them."""

from __future__ import annotations

import openai

from loadtest.simulated_version import END_OF_TURN
from tests.support.http_front import CHAT
from tests.support.router_rig import MODEL, Rig


def _answering(r: Rig, text: str, *, end: bool = True) -> None:
    """From now on the answer to everything is this text."""
    ids = [*text.encode(), *([END_OF_TURN] if end else [])]
    for worker in r.workers:
        worker.behaviour.script = lambda ticket: ids


async def test_a_whole_chat(client: openai.AsyncOpenAI, r: Rig):
    _answering(r, "Hello.")
    answer = await client.chat.completions.create(**CHAT)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello.", "stop")
    assert answer.object == "chat.completion"
    assert answer.system_fingerprint == "root-" + r.roots[0].hex()
    assert answer.usage is not None
    prompt = len(r.prefills[0].tickets[0].prompt)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 6)
    assert answer.usage.total_tokens == prompt + 6
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id


async def test_the_chat_template_makes_the_prompt(client: openai.AsyncOpenAI, r: Rig):
    await client.chat.completions.create(**CHAT)
    ids = r.prefills[0].tickets[0].prompt
    text = b"".join({256: b"<S>", 257: b"<E>"}.get(i, bytes([i % 256])) for i in ids).decode()
    assert text == "<S>user\nhi<E>\n<S>assistant\n"


async def test_a_streamed_chat(client: openai.AsyncOpenAI, r: Rig):
    _answering(r, "Grüße, 日本 😀!")
    for worker in r.workers:
        worker.behaviour.step_s = 0.001
    stream = await client.chat.completions.create(
        **CHAT | {"max_tokens": 60}, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Grüße, 日本 😀!"
    assert len(deltas) > 5
    assert not any("�" in (delta.content or "") for delta in deltas)
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("Grüße, 日本 😀!".encode())
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.system_fingerprint for chunk in chunks} == {"root-" + r.roots[0].hex()}


async def test_the_length_limit(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(**CHAT)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    newer = await client.chat.completions.create(model=MODEL, messages=CHAT["messages"], max_completion_tokens=3)
    assert newer.usage is not None
    assert newer.usage.completion_tokens == 3


async def test_stop_strings_never_leak(client: openai.AsyncOpenAI, r: Rig):
    _answering(r, "one STO two STOP three")
    for worker in r.workers:
        worker.behaviour.step_s = 0.001
    whole = await client.chat.completions.create(**CHAT | {"max_tokens": 60}, stop=["STOP"])
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("one STO two ", "stop")
    stream = await client.chat.completions.create(**CHAT | {"max_tokens": 60}, stop="STOP", stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == "one STO two "
    await r.until_idle()


async def test_stop_ids_and_ignore_eos(client: openai.AsyncOpenAI, r: Rig):
    _answering(r, "abcdef")
    stopped = await client.chat.completions.create(**CHAT, extra_body={"stop_token_ids": [ord("d")]})
    assert stopped.choices[0].message.content == "abc"
    for worker in r.workers:
        worker.behaviour.script = lambda ticket: [END_OF_TURN] * 100
    on = await client.chat.completions.create(**CHAT, extra_body={"ignore_eos": True, "min_tokens": 8})
    assert on.usage is not None
    assert on.usage.completion_tokens == 8


async def test_choices_have_their_own_draws_and_a_seed_repeats_them(client: openai.AsyncOpenAI):
    one, two = [await client.chat.completions.create(**CHAT, n=3, seed=7, temperature=1) for _ in range(2)]
    texts = [choice.message.content for choice in one.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in two.choices]
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    free = [await client.chat.completions.create(**CHAT, temperature=1) for _ in range(2)]
    assert free[0].choices[0].message.content != free[1].choices[0].message.content


async def test_streamed_choices(client: openai.AsyncOpenAI):
    whole = await client.chat.completions.create(**CHAT, n=3, seed=7)
    texts = {0: "", 1: "", 2: ""}
    stream = await client.chat.completions.create(
        **CHAT, n=3, seed=7, stream=True, extra_headers={"Cache-Control": "no-store"}
    )
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [texts[i] for i in range(3)] == [choice.message.content for choice in whole.choices]


async def test_logprobs_of_a_chat(client: openai.AsyncOpenAI, r: Rig):
    _answering(r, "aé")
    answer = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    listed = answer.choices[0].logprobs
    assert listed is not None
    assert listed.content is not None
    assert [(t.token, t.bytes, t.logprob) for t in listed.content] == [
        ("a", [97], -0.5),
        ("�", [0xC3], -0.5),
        ("�", [0xA9], -0.5),
    ]
    assert [top.token for top in listed.content[0].top_logprobs] == ["a", "b"]
    stream = await client.chat.completions.create(**CHAT, logprobs=True, stream=True)
    tokens = [
        t.token async for c in stream for t in (c.choices[0].logprobs.content or [] if c.choices[0].logprobs else [])
    ]
    assert tokens == ["a", "�", "�"]


async def test_completions_of_every_form_of_prompt(client: openai.AsyncOpenAI, r: Rig):
    for prompt in ("ab", [97, 98], ["ab"], [[97, 98]]):
        answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)  # type: ignore[arg-type]
        assert answer.object == "text_completion"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 2
        assert r.prefills[0].tickets[-1].prompt == (97, 98)
    both = await client.completions.create(model=MODEL, prompt=["ab", "cd"], n=2, max_tokens=4, seed=1)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.usage is not None
    assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (4, 16)
    assert [bytes(t.prompt) for t in r.prefills[0].tickets[-4:]] == [b"ab", b"ab", b"cd", b"cd"]


async def test_the_default_length_of_a_completion(client: openai.AsyncOpenAI):
    answer = await client.completions.create(model=MODEL, prompt="x", temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


async def test_echo_and_logprobs_of_a_completion(client: openai.AsyncOpenAI, r: Rig):
    _answering(r, "cd")
    answer = await client.completions.create(model=MODEL, prompt="ab", echo=True, logprobs=1, max_tokens=9)
    assert answer.choices[0].text == "abcd"
    listed = answer.choices[0].logprobs
    assert listed is not None
    assert listed.tokens == ["a", "b", "c", "d"]
    assert listed.text_offset == [0, 1, 2, 3]
    assert listed.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert listed.top_logprobs == [None, {"b": -0.5}, {"c": -0.5}, {"d": -0.5}]
    assert r.prefills[0].tickets[0].prompt_logprobs == 1


async def test_an_echo_without_an_answer(client: openai.AsyncOpenAI, r: Rig):
    plain = await client.completions.create(model=MODEL, prompt="ab", echo=True, max_tokens=0)
    assert (plain.choices[0].text, plain.choices[0].finish_reason) == ("ab", "length")
    assert not r.prefills[0].tickets, "nothing to compute"
    by_ids = await client.completions.create(model=MODEL, prompt=[97, 98], echo=True, max_tokens=0)
    assert by_ids.choices[0].text == "ab"


async def test_scoring_a_prompt(client: openai.AsyncOpenAI, r: Rig):
    scored = await client.completions.create(model=MODEL, prompt="abc", echo=True, logprobs=0, max_tokens=0)
    listed = scored.choices[0].logprobs
    assert listed is not None
    assert listed.token_logprobs == [None, -0.5, -0.5]
    assert scored.choices[0].text == "abc"


async def test_streamed_completions_with_usage_in_every_chunk(client: openai.AsyncOpenAI, r: Rig):
    for worker in r.workers:
        worker.behaviour.step_s = 0.001
    stream = await client.completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )
    chunks = [chunk async for chunk in stream]
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 6
